"""How alike two models are in one coordinate system, layer by layer and kind by kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from torch import Tensor

from symmerge.checkpoints.json_results import Record
from symmerge.lineage.disguise import UNITS, Undisguised
from symmerge.symmetry.groups.linalg import total
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Spec, layer_of

KINDS = (
    *("embeddings", "queries and keys", "values", "attention output"),
    *("units, incoming", "units, outgoing", "head"),
)
"""Kinds of tensors, in the order of the picture; `head` is the model's, not attention's."""
SMALLEST_SIDE = 4


@dataclass(frozen=True)
class LikenessCell(Record):
    """One kind of tensors in one layer."""

    layer: Annotated[int | None, "The layer of B; null outside of the layers."]
    kind: Annotated[str, "Kind of tensors."]
    cosine: Annotated[float, "Cosine between A and undisguised B."]
    slope: Annotated[float, "How much of A is in B, by least squares."]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a cell of kind {self.kind[:40]!r}")


@dataclass
class _Sums:
    """Inner products of the sides of a cell."""

    ab: float = 0.0
    aa: float = 0.0
    bb: float = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        self.ab += total(a * b).item()
        self.aa += total(a * a).item()
        self.bb += total(b * b).item()


def measure_likeness(pair: Undisguised) -> tuple[LikenessCell, ...]:
    """All cells of the undisguised pair, in the order of layers and kinds."""
    sums: dict[tuple[int | None, str], _Sums] = {}
    for name, piece, a, b in matrices(pair):
        cell = layer_of(name), kind_of(pair.spec, piece)
        sums.setdefault(cell, _Sums()).add(_centred(a), _centred(b))
    cells = (
        LikenessCell(layer, kind, s.ab / max((s.aa * s.bb) ** 0.5, 1e-30), s.ab / max(s.aa, 1e-30))
        for (layer, kind), s in sums.items()
    )
    return tuple(sorted(cells, key=_place))


def typical(cells: Iterable[LikenessCell], what: str = "cosine") -> float:
    """The median of a field over cells; 0 without any."""
    values = [getattr(cell, what) for cell in cells]
    return median(values) if values else 0.0


def by_layer(cells: Iterable[LikenessCell]) -> Mapping[int | None, list[LikenessCell]]:
    """Cells by their layer."""
    layers: dict[int | None, list[LikenessCell]] = {}
    for cell in cells:
        layers.setdefault(cell.layer, []).append(cell)
    return layers


def matrices(pair: Undisguised) -> Iterator[tuple[str, Piece, Tensor, Tensor]]:
    """Every matrix of both, the stream first: the tensor's name, the piece, A and B."""
    for name, pieces in pair.spec.pieces.items():
        a, b = pair.reference.weights[name], pair.aligned.weights[name]
        for piece in pieces:
            if len(piece.atoms) < 2 or len(pair.spec.shapes[name]) < 2:  # biases have heads, too
                continue
            at = next(piece.positions(pair.spec.stream), 0)
            x, y = (piece.view(side).movedim(at, 0).flatten(1) for side in (a, b))
            if min(x.shape) >= SMALLEST_SIDE:
                yield name, piece, x, y


def kind_of(spec: Spec, piece: Piece) -> str:
    """The kind of a matrix, by the spaces it meets."""
    units = {atom.role for atom in piece.atoms if atom.space.startswith(UNITS)}
    if units:
        return "units, outgoing" if Role.READS in units else "units, incoming"
    inside = {spec.spaces[atom.space].translation: atom.role for atom in piece.atoms}
    if "drops" in inside:
        return "queries and keys"
    if "passes" in inside:
        return "attention output" if inside["passes"] is Role.READS else "values"
    reads = any(a.space == spec.stream and a.role is Role.READS for a in piece.atoms)
    return "head" if reads else "embeddings"


def _place(cell: LikenessCell) -> tuple[int, int]:
    return (-1 if cell.layer is None else cell.layer), KINDS.index(cell.kind)


def _centred(matrix: Tensor) -> Tensor:
    matrix = matrix - matrix.mean(0, keepdim=True)
    return matrix - matrix.mean(1, keepdim=True)
