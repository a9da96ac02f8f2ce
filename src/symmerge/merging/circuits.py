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
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.models.canonical.balancing import balance_circuit
from symmerge.models.circuit_form import circuit_ends, circuit_spaces
from symmerge.models.circuits import circuit_of, computed_once, with_pieces
from symmerge.models.interpolation import PieceTime, between
from symmerge.models.model import Model
from symmerge.symmetry.notation import Piece


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
    first, second = circuit_ends(a, b)
    tensors = {name: partial(between, first, second, time, name) for name in first.weights}
    wide = replace(first, history=a.history)
    return wide.derive(DerivedWeights(first.weights, tensors), step=step)
