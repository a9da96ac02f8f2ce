"""The two sides of a space: everything that writes to it and everything that reads from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.models.alignment import lay
from symmerge.models.model import Model
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Occurrence, Spec


def piece_of(met: Occurrence, weights: Weights) -> Tensor:
    return met.piece.view(weights[met.piece.tensor])


Sides = Callable[[str], Mapping[Piece, Tensor]]
"""The new pieces of every tensor that meets a space."""


def computed_once(compute: Sides) -> Sides:
    """Tensors of a space are asked for at the same time by the threads that write them: the second waits for what the first computes."""
    lock, cached = (
        Lock(),
        lru_cache(maxsize=6)(compute),
    )  # a tensor may hold pieces of several spaces

    def sides(space: str) -> Mapping[Piece, Tensor]:
        with lock:
            return cached(space)

    return sides


def with_pieces(
    spec: Spec, tensor: str, read: Callable[[str], Tensor], sides: Sides, spaces: set[str]
) -> Tensor:
    """A tensor with its pieces in some spaces replaced."""
    result = read(tensor).clone()
    for piece in spec.pieces[tensor]:
        for atom in piece.atoms:
            if atom.space in spaces and atom.role is not Role.RIDES:
                piece.view(result).copy_(sides(atom.space)[piece])
    return result


class Place(NamedTuple):
    """Where some columns of a circuit's side belong: a piece, how many they are, and how to lay them back into it."""

    piece: Piece
    width: int
    undo: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Circuit:
    """All that writes to a space (`x`) and all that reads from it (`y`), side by side; only x'y matters to the function."""

    x: Float[Tensor, "b n x"]
    y: Float[Tensor, "b n y"]
    writers: tuple[Place, ...]
    readers: tuple[Place, ...]

    def pieces(self, x: Float[Tensor, "b n x"], y: Float[Tensor, "b n y"]) -> dict[Piece, Tensor]:
        """Other factors, as pieces of the tensors they belong to."""
        found = {}
        for places, whole in ((self.writers, x), (self.readers, y)):
            for place, part in zip(
                places, whole.split([place.width for place in places], -1), strict=True
            ):
                found[place.piece] = place.undo(part)
        return found


def circuit(model: Model, space: str) -> Circuit:
    """The two sides of a space."""
    per, sides = model.spec.spaces[space].per, {}
    for role in (Role.WRITES, Role.READS):
        places, parts = [], []
        for met in model.spec.occurrences(space):
            if met.role is role:
                outer = None if per is None else next(met.piece.positions(per))
                laid, undo = lay(piece_of(met, model.weights), met.position, outer)
                places.append(Place(met.piece, laid.shape[-1], undo))
                parts.append(laid)
        sides[role] = torch.cat(parts, -1), tuple(places)
    (x, writers), (y, readers) = sides[Role.WRITES], sides[Role.READS]
    return Circuit(x, y, writers, readers)
