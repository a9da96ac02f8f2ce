"""Merge attention by its circuits instead of its factors.

In a head only products matter: queries with keys, values with outputs. Interpolating the products needs no common basis. Two ways to write the
result: cut it back to the head's rank by SVD (stock size; the path between the parents is curved), or keep all of it in heads of twice the size
(what the papers do, up to size; no stock checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights
from symmerge.errors import MismatchError
from symmerge.models.canonical.balancing import balance_circuit
from symmerge.models.circuits import circuit, computed_once, with_pieces
from symmerge.models.interpolation import PieceTime
from symmerge.models.model import INFLATED, Model, inflated
from symmerge.symmetry.groups import GeneralLinear, RotaryPairs
from symmerge.symmetry.notation import Piece, Role


def spaces(model: Model) -> list[str]:
    """The spaces inside heads where any invertible change of basis is exact; rotary queries and keys are not among them."""
    return [
        name
        for name, space in model.spec.spaces.items()
        if space.per and isinstance(space.group, GeneralLinear)
    ]


def cut(
    a: Model, b: Model, time: PieceTime, mean: Callable[[str], Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """For every tensor inside heads: the factors of the interpolated circuits, cut back to rank; `mean` gives what is no circuit."""
    pieces, found = computed_once(partial(_cut_pieces, a, b, time)), set(spaces(a))
    return {
        met.piece.tensor: partial(with_pieces, a.spec, met.piece.tensor, mean, pieces, found)
        for space in sorted(found)
        for met in a.spec.occurrences(space)
    }


def _cut_pieces(a: Model, b: Model, time: PieceTime, space: str) -> dict[Piece, Tensor]:
    first, second = circuit(a, space), circuit(b, space)
    t = time(first.writers[0].piece)
    x = torch.cat([first.x, second.x], -2).double()
    y = torch.cat([(1 - t) * first.y, t * second.y], -2).double()
    size = first.x.shape[-2]
    x, y = (
        side[..., :size, :].to(first.x)
        for side in balance_circuit(a.spec.spaces[space].group, x, y)
    )
    return first.pieces(x, y)


def inflate(a: Model, b: Model, time: PieceTime, step: Mapping[str, object]) -> Model:
    """Heads of twice the size that hold both parents' circuits: exact, for research, no stock checkpoint."""
    found = set(spaces(a))
    if any(isinstance(space.group, RotaryPairs) for space in a.spec.spaces.values()):
        raise MismatchError(
            f"--attention circuits: queries and keys of {a.spec.family} turn with their positions, so their circuit is not one matrix;"
            " use --attention factors or svd"
        )
    spec = inflated(a.spec)
    computed = {
        name: partial(_both, a, b, name, spec.shapes[name], spec.pieces[name], time, found)
        for name in a.spec.tensors
    }
    added = {name: (spec.shapes[name], a.weights.dtype(name)) for name in a.spec.tensors}
    weights = DerivedWeights(MemoryWeights({}), computed, added=added)
    return replace(a.derive(weights, step=step), spec=spec, config={**a.config, INFLATED: True})


def _both(
    a: Model,
    b: Model,
    name: str,
    shape: tuple[int, ...],
    pieces: tuple[Piece, ...],
    time: PieceTime,
    found: set[str],
) -> Tensor:
    sides = a.weights[name], b.weights[name]
    result = torch.empty(shape, dtype=sides[0].dtype)
    for small, large in zip(a.spec.pieces[name], pieces, strict=True):
        t, (x, y) = time(small), (small.view(side) for side in sides)
        inside = [position for position, atom in enumerate(small.atoms) if atom.space in found]
        if not inside:
            large.view(result).copy_(torch.lerp(x, y, t))
            continue
        (position,) = inside
        reads = (
            small.atoms[position].role is Role.READS
        )  # one side of the product carries the weights
        large.view(result).copy_(
            torch.cat([x * (1 - t if reads else 1), y * (t if reads else 1)], position)
        )
    return result
