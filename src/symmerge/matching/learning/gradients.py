"""The gradient of a loss along the symmetries, and all that a step does to every layer alike, done for all layers at once.

An element that moves by a little changes the moved weights W to W + D W, wherever its space is met. So the gradient by D is the gradient by W times W',
summed over the tensors that meet the space: the same contraction that makes evidence of two models, with the gradient in the place of A. No
gradient flows through the transport itself, and a step costs little more than a forward and a backward pass of the model.

On a GPU small products cost what starting them costs. So spaces that have one group (the bases of all heads of all layers) lie in one tensor, a bundle, and so do
the tensors that meet them alike (the queries of all layers), a stack: a step takes one product for each, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from symmerge.matching.learning.bundles import Block, Bundle
from symmerge.models.alignment import lay
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Spec

Slope = dict[Role, Tensor]


def slopes(
    spec: Spec, spaces: Iterable[str], gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> dict[str, Slope]:
    """For each space and role: the sum of gradient times moved weights', [*batch, n, n]."""
    return {space: _slope(spec, space, gradients, moved) for space in spaces}


def _slope(
    spec: Spec, space: str, gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor]
) -> Slope:
    n, batch, per = spec.sizes[space], spec.batch(space), spec.spaces[space].per
    some = next(iter(moved.values()))
    found = {
        role: torch.zeros(*(batch or (1,)), n, n, device=some.device, dtype=some.dtype)
        for role in Role
    }
    for met in spec.occurrences(space):
        name = met.piece.tensor
        if name not in gradients:
            continue
        outer = None if per is None else next(met.piece.positions(per))
        gradient, weights = (
            lay(met.piece.view(side[name]), met.position, outer)[0] for side in (gradients, moved)
        )
        found[met.role].baddbmm_(gradient, weights.mT)
    return {role: total.reshape(*batch, n, n) for role, total in found.items()}


def whole(slope: Slope) -> Tensor:
    """All roles together, for groups in which an element acts alike in all of them."""
    return slope[Role.WRITES] + slope[Role.READS] + slope[Role.RIDES]


def bundled_slopes(
    bundled: Iterable[Bundle], gradients: Block, moved: Block
) -> dict[Bundle, Slope]:
    """For each bundle: the sum of gradient times moved weights' where it writes and where it reads, [spaces, *batch, n, n]."""
    laid: dict[tuple[Bundle, Role], list[tuple[int, Tensor, Tensor]]] = {
        (bundle, role): [] for bundle in bundled for role in Role if role is not Role.RIDES
    }
    for stack in moved.stacks:
        for meetings, views in stack.views(gradients.stacks[stack], moved.stacks[stack]):
            for met in meetings:
                gradient, weights = (met.lay(view)[0] for view in views)
                laid[met.bundle, met.role].append((met.first, gradient, weights))
    found: dict[Bundle, Slope] = {}
    for (bundle, role), parts in laid.items():
        found.setdefault(bundle, {})[role] = _added(bundle, parts, moved.whole)
    return found


def _added(bundle: Bundle, parts: list[tuple[int, Tensor, Tensor]], like: Tensor) -> Tensor:
    """Products added up where they are made; what all layers share is added up over the layers at the end."""
    spaces, n = len(bundle.names), bundle.group.size
    deep = max([spaces, *(first + len(gradient) for first, gradient, _ in parts)])
    total = like.new_zeros(deep, *bundle.batch, n, n)
    for first, gradient, weights in parts:
        total[first : first + len(gradient)].flatten(0, -3).baddbmm_(
            gradient.flatten(0, -3), weights.flatten(0, -3).mT
        )
    return total if deep == spaces else total.sum(0, keepdim=True)
