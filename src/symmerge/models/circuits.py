"""The two sides of a space: everything that writes to it and everything that reads from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.memory import workers
from symmerge.checkpoints.weights import Weights
from symmerge.models.alignment import lay
from symmerge.models.model import Model
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Occurrence, Spec

KEPT = 3 * workers()  # spaces: a tensor may meet several, and every worker has its own tensor
NewPieces = Callable[[str], Mapping[Piece, Tensor]]
"""Space -> the new pieces of every tensor that meets it."""


def read_piece(occurrence: Occurrence, weights: Weights) -> Tensor:
    """The piece of a tensor in which a space occurs."""
    return occurrence.piece.view(weights[occurrence.piece.tensor])


def computed_once(compute: NewPieces) -> NewPieces:
    """Thread-safe cache: a second thread that asks for a space waits for the first's result.

    Other spaces are computed meanwhile. With one lock for all, 16 cores were as slow as one.
    """
    lock, known = Lock(), OrderedDict[str, Future[Mapping[Piece, Tensor]]]()

    def pieces(space: str) -> Mapping[Piece, Tensor]:
        with lock:
            waiting = known.get(space)
            result = known[space] = waiting or Future()
            known.move_to_end(space)
            while len(known) > KEPT:
                known.popitem(last=False)
        if waiting is None:
            try:
                result.set_result(compute(space))
            except BaseException as error:
                result.set_exception(error)
                known.pop(space, None)
                raise
        return result.result()

    return pieces


def with_pieces(
    spec: Spec, tensor: str, read: Callable[[str], Tensor], pieces: NewPieces, spaces: set[str]
) -> Tensor:
    """A tensor with its pieces in some spaces replaced."""
    result = read(tensor).clone()
    for piece in spec.pieces[tensor]:
        for atom in piece.atoms:
            if atom.space in spaces and atom.role is not Role.RIDES:
                piece.view(result).copy_(pieces(atom.space)[piece])
    return result


@dataclass(frozen=True)
class Columns:
    """Columns of one side of a circuit: their piece, their number, and how to reshape them back."""

    piece: Piece
    width: int
    undo: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Circuit:
    """Everything that writes to a space (`x`) and that reads from it (`y`); only x'y matters."""

    x: Float[Tensor, "b n x"]
    y: Float[Tensor, "b n y"]
    writers: tuple[Columns, ...]
    readers: tuple[Columns, ...]

    def pieces(self, x: Float[Tensor, "b n x"], y: Float[Tensor, "b n y"]) -> dict[Piece, Tensor]:
        """New factors, as pieces of the tensors they belong to."""
        return _split(x, self.writers) | _split(y, self.readers)


def _split(side: Tensor, columns: Sequence[Columns]) -> dict[Piece, Tensor]:
    blocks = side.split([one.width for one in columns], -1)
    return {one.piece: one.undo(block) for one, block in zip(columns, blocks, strict=True)}


def circuit_of(model: Model, space: str) -> Circuit:
    """The two sides of a space."""
    (x, writers), (y, readers) = (_side(model, space, role) for role in (Role.WRITES, Role.READS))
    return Circuit(x, y, writers, readers)


def _side(model: Model, space: str, role: Role) -> tuple[Tensor, tuple[Columns, ...]]:
    per, columns, blocks = model.spec.spaces[space].per, [], []
    for occurrence in model.spec.occurrences(space):
        if occurrence.role is role:
            outer = None if per is None else next(occurrence.piece.positions(per))
            laid, undo = lay(read_piece(occurrence, model.weights), occurrence.position, outer)
            columns.append(Columns(occurrence.piece, laid.shape[-1], undo))
            blocks.append(laid)
    return torch.cat(blocks, -1), tuple(columns)
