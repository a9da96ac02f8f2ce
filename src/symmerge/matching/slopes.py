"""The gradient of a loss along the symmetries.

An element that moves by a little changes the moved weights W to W + D W, wherever its space is met. So the gradient by D is the gradient by W times W',
summed over the tensors that meet the space: the same contraction that makes evidence of two models, with the gradient in the place of A. No
gradient flows through the transport itself, and a step costs little more than a forward and a backward pass of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from symmerge.alignment import lay
from symmerge.notation import Role
from symmerge.spec import Spec

Slope = dict[Role, Tensor]


def slopes(spec: Spec, spaces: Iterable[str], gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> dict[str, Slope]:
    """For each space and role: the sum of gradient times moved weights', [*batch, n, n]."""
    return {space: _slope(spec, space, gradients, moved) for space in spaces}


def _slope(spec: Spec, space: str, gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> Slope:
    n, batch, per = spec.sizes[space], spec.batch(space), spec.spaces[space].per
    some = next(iter(moved.values()))
    found = {role: torch.zeros(*(batch or (1,)), n, n, device=some.device, dtype=some.dtype) for role in Role}
    for met in spec.occurrences(space):
        name = met.piece.tensor
        if name not in gradients:
            continue
        outer = None if per is None else next(met.piece.positions(per))
        gradient, weights = (lay(met.piece.view(side[name]), met.position, outer)[0] for side in (gradients, moved))
        found[met.role] += gradient @ weights.mT
    return {role: total.reshape(*batch, n, n) for role, total in found.items()}


def whole(slope: Slope) -> Tensor:
    """All roles together, for groups in which an element acts alike in all of them."""
    return slope[Role.WRITES] + slope[Role.READS] + slope[Role.RIDES]
