"""structure.json: a summary of an alignment, small enough for a report page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from symmerge.checkpoints.json_results import OMIT, Record, ResultFile
from symmerge.models.alignment import Alignment
from symmerge.symmetry.groups import Element
from symmerge.symmetry.groups.base import Group
from symmerge.symmetry.notation import Role

MAX_ROWS = 64  # of a stored matrix


@dataclass(frozen=True, kw_only=True)
class SpaceStructure(Record):
    """The element of one space."""

    space: Annotated[str, "Name of the space."]
    group: Annotated[str, "Its symmetry group."]
    size: Annotated[int, "Coordinates of one element."]
    kind: Annotated[Literal["permutation", "rotation", "basis"], "`rotation` is orthogonal."]
    blocks: Annotated[int, "Elements of the space, one per head; they lie on the diagonal."] = 1
    index: Annotated[
        tuple[int, ...] | None,
        OMIT,
        "Of a permutation: new coordinate i is old coordinate `index[i]`.",
    ] = None
    matrix: Annotated[
        tuple[tuple[float, ...], ...] | None,
        OMIT,
        "Of any other: absolute values, pooled to 64 rows by the root of the mean square.",
    ] = None
    moved: Annotated[float | None, "Share of the coordinates a permutation moves."] = None
    change: Annotated[float, "Distance of the other parts from the identity."] = 0.0

    def __post_init__(self) -> None:
        if (self.index if self.kind == "permutation" else self.matrix) is None:
            raise ValueError(f"the {self.kind} of {self.space} has neither index nor matrix")


@dataclass(frozen=True)
class StructureFile(ResultFile):
    """What an alignment does in every space."""

    SCHEMA, WRITER = "symmerge.structure/1", "symmerge align"

    spaces: Annotated[tuple[SpaceStructure, ...], "By space."]


def structure_of(alignment: Alignment) -> StructureFile:
    """Per space: its group, the distance of its element from the identity, and an image of it."""
    rows = alignment.describe()
    return StructureFile(tuple(SpaceStructure(**row, **_picture(alignment, row)) for row in rows))


def _picture(alignment: Alignment, row: Mapping[str, Any]) -> dict[str, Any]:
    group, element = alignment.spec.spaces[row["space"]].group, alignment[row["space"]]
    if "index" in element:
        index = element["index"].reshape(-1, group.size)
        # One element per head: blocks on the diagonal.
        index = (index + group.size * torch.arange(len(index))[:, None]).flatten()
        blocks = len(index) // group.size
        return {"kind": "permutation", "blocks": blocks, "index": tuple(index.tolist())}
    matrices = _matrices(group, element)
    return {
        "kind": "rotation" if _orthogonal(matrices) else "basis",
        "blocks": len(matrices),
        "matrix": tuple(map(tuple, _small(matrices).tolist())),
    }


def _matrices(group: Group, element: Element) -> Float[Tensor, "batch n n"]:
    """Any element as the matrices it acts by: its action on the identity."""
    batch = next(iter(element.values())).shape[: -len(next(iter(group.shapes().values())))]
    eye = (
        torch.eye(group.size, dtype=torch.float64)
        .expand(*batch, group.size, group.size)
        .contiguous()
    )
    return group.act(element, eye, Role.WRITES).reshape(-1, group.size, group.size)


def _small(matrices: Float[Tensor, "batch n n"]) -> Float[Tensor, "rows rows"]:
    """Block-diagonal matrix, pooled by root mean square so that a rotation keeps its energy."""
    blocks = torch.block_diag(*matrices).abs()
    if len(blocks) <= MAX_ROWS:
        return blocks
    return adaptive_avg_pool2d(blocks[None, None] ** 2, MAX_ROWS)[0, 0].sqrt()


def _orthogonal(matrix: Float[Tensor, "*batch n n"]) -> bool:
    return bool(
        ((matrix @ matrix.mT - torch.eye(matrix.shape[-1], dtype=matrix.dtype)).abs() < 1e-4).all()
    )
