"""What is left in each tensor once B has moved: measured with as few passes as possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from torch import Tensor

from symmerge.matching.evidence import Evidence
from symmerge.models.alignment import Alignment
from symmerge.symmetry.groups import Element
from symmerge.symmetry.groups.linalg import squares, total
from symmerge.symmetry.groups.orthogonal import RotationGroup
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Occurrence

# |A|^2 + |B|^2 - 2 <A, gB> loses the digits that this share of it has before its own.
CANCELS = 1e-2


class TensorError(NamedTuple):
    """What is left in one tensor: weighted, and |A - B|^2, |A|^2, |B|^2 for weights."""

    name: str
    weighted: float
    squares: tuple[float, float, float]


@final
@dataclass(frozen=True)
class MovedPieces:
    """Pieces of A, and of B moved in every space but a block's: of tensors that only it changes.

    Rotating a layer's tensors a second time, to measure them, took as long as the first time.
    """

    pieces: dict[Piece, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def errors(self, evidence: Evidence, elements: Mapping[str, Element]) -> Iterable[TensorError]:
        """The errors of the tensors all of whose pieces are here, under the block's elements."""
        last = Alignment(evidence.spec, elements)
        for name in sorted({piece.tensor for piece in self.pieces}):
            cut = evidence.spec.pieces[name]
            if self.pieces.keys() >= set(cut) and evidence.rows(name) is None:
                parts = [self._part(piece, last) for piece in cut]
                yield error_of(evidence, name, *(sum(each) for each in zip(*parts, strict=True)))

    def _part(self, piece: Piece, last: Alignment) -> tuple[float, float, float]:
        a, b = self.pieces[piece]
        moved = last.act_on(piece, b)
        return squares(moved, a), squares(a), squares(moved)


def error_of(
    evidence: Evidence, name: str, apart: float, size_a: float, size_b: float
) -> TensorError:
    """The error of a tensor whose rows count alike, from its squares."""
    is_weight = name in evidence.table.tensors
    known = (apart, size_a, size_b) if is_weight else (0.0, 0.0, 0.0)
    return TensorError(name, evidence.scale(name) * apart, known)


def measured(evidence: Evidence, elements: Mapping[str, Element], name: str) -> TensorError:
    """The error of any tensor: it is read and moved once more."""
    a, b = evidence.plain(name)
    moved = Alignment(evidence.spec, elements).transport(name, b)
    rows = evidence.rows(name)
    if rows is None:
        return error_of(evidence, name, squares(moved, a), squares(a), squares(moved))
    # may be the model's own tensor: never in place
    error = (moved - a).square_()
    weighted = float(total(error.sum(1) * rows.to(error).square()))
    return TensorError(
        name, evidence.scale(name) * weighted, (float(total(error)), squares(a), squares(moved))
    )


@final
@dataclass(frozen=True)
class CertainCrosses:
    """Cross Gram matrices of the tensors that meet one rotated stream and nothing else.

    They never change, and what the rotation leaves follows from them. Moving the embeddings of
    128,256 tokens just to measure them took a quarter of the time of two layers.
    """

    evidence: Evidence
    crosses: dict[str, Tensor] = field(default_factory=dict)

    def holds(self, space: str, occurrence: Occurrence) -> bool:
        """Whether the cross Gram matrix of an occurrence may be kept."""
        name, spec = occurrence.piece.tensor, self.evidence.spec
        return (
            name in self.evidence.certain
            and isinstance(spec.spaces[space].group, RotationGroup)
            and occurrence.role is not Role.RIDES  # a gain does not turn
            and len(spec.pieces[name]) == 1
            and len(list(occurrence.piece.positions(space))) == 1
        )

    def error(self, name: str, elements: Mapping[str, Element]) -> TensorError | None:
        """The error of a tensor; None where it is not known, or to too few digits."""
        if name not in self.crosses or self.evidence.rows(name) is not None:
            return None
        (space,) = self.evidence.hidden(name)
        cross, (size_a, size_b) = self.crosses[name], self.evidence.squares(name)
        inner = float(total(cross * elements[space]["matrix"].to(cross)))
        apart = size_a + size_b - 2 * inner / self.evidence.scale(name)
        if apart < CANCELS * (size_a + size_b):
            return None
        return error_of(self.evidence, name, apart, size_a, size_b)
