"""Merge attention by its circuits instead of its factors.

In a head only two products matter: QK and OV. They can be interpolated without a common basis.
The result is either truncated to the head's rank by SVD (stock size; the path between the parents
is curved), or kept at full rank in heads of twice the size (as in the papers; not stock).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights
from symmerge.errors import MismatchError
from symmerge.models.canonical.balancing import balance_circuit
from symmerge.models.circuits import circuit_of, computed_once, with_pieces
from symmerge.models.interpolation import PieceTime
from symmerge.models.model import INFLATED, Model, inflated
from symmerge.symmetry.groups import GeneralLinear, RotaryPairs, Signs
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Spec


def circuit_spaces(model: Model) -> set[str]:
    """Spaces inside heads with the full GL symmetry; rotary ones are excluded."""
    return {
        name
        for name, space in model.spec.spaces.items()
        if space.per and isinstance(space.group, GeneralLinear)
    }


def cut(
    a: Model, b: Model, time: PieceTime, mean: Callable[[str], Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """For every tensor inside heads: factors of the interpolated circuits, truncated to rank.

    `mean` computes the parts of a tensor that belong to no circuit.
    """
    pieces, spaces = computed_once(partial(_cut_pieces, a, b, time)), circuit_spaces(a)
    return {
        met.piece.tensor: partial(with_pieces, a.spec, met.piece.tensor, mean, pieces, spaces)
        for space in sorted(spaces)
        for met in a.spec.occurrences(space)
    }


def _cut_pieces(a: Model, b: Model, time: PieceTime, space: str) -> dict[Piece, Tensor]:
    first, second = circuit_of(a, space), circuit_of(b, space)
    t = time(first.writers[0].piece)
    x = torch.cat([first.x, second.x], -2).double()
    y = torch.cat([(1 - t) * first.y, t * second.y], -2).double()
    size, group = first.x.shape[-2], a.spec.spaces[space].group
    x, y = (side[..., :size, :].to(first.x) for side in balance_circuit(group, x, y))
    return first.pieces(x, y)


def inflate(a: Model, b: Model, time: PieceTime, step: HistoryStep) -> Model:
    """Heads of twice the size that hold both parents' circuits: exact, but not stock."""
    if any(isinstance(space.group, RotaryPairs | Signs) for space in a.spec.spaces.values()):
        raise MismatchError(
            f"--attention circuits: queries and keys of {a.spec.family} turn with their positions,"
            " so their circuit is not one matrix; use --attention factors or svd"
        )
    spec = inflated(a.spec)
    tensors = {name: partial(_both, a, b, name, spec, time) for name in a.spec.tensors}
    added = {name: (spec.shapes[name], a.weights.dtype(name)) for name in a.spec.tensors}
    weights = DerivedWeights(MemoryWeights({}), tensors, added=added)
    return replace(a.derive(weights, step=step), spec=spec, config={**a.config, INFLATED: True})


def _both(a: Model, b: Model, name: str, spec: Spec, time: PieceTime) -> Tensor:
    sides, spaces = (a.weights[name], b.weights[name]), circuit_spaces(a)
    result = torch.empty(spec.shapes[name], dtype=sides[0].dtype)
    for small, large in zip(a.spec.pieces[name], spec.pieces[name], strict=True):
        t, (x, y) = time(small), (small.view(side) for side in sides)
        inside = [position for position, atom in enumerate(small.atoms) if atom.space in spaces]
        if not inside:
            large.view(result).copy_(torch.lerp(x, y, t))
            continue
        (position,) = inside
        # The interpolation weights go into one factor only.
        reads = small.atoms[position].role is Role.READS
        factors = (1 - t, t) if reads else (1, 1)
        large.view(result).copy_(torch.cat([x * factors[0], y * factors[1]], position))
    return result
