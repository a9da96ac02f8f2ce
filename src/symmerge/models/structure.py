"""What an alignment looks like, small enough for a page: permutations as they are, other elements as pictures of their matrices."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from symmerge.models.alignment import Alignment
from symmerge.symmetry.groups import Element
from symmerge.symmetry.groups.base import Group
from symmerge.symmetry.notation import Role

SCHEMA = "symmerge.structure/1"
LARGEST = 64  # rows of a picture


def structure_of(alignment: Alignment) -> dict[str, Any]:
    """The content of structure.json: for each space its group, how far its element is from doing nothing, and a picture."""
    spaces = [
        {**row, **_picture(alignment.spec.spaces[row["space"]].group, alignment[row["space"]])}
        for row in alignment.describe()
    ]
    return {"schema": SCHEMA, "spaces": spaces}


def _picture(group: Group, element: Element) -> dict[str, Any]:
    if "index" in element:
        index = element["index"].reshape(-1, group.size)
        # One element per head: blocks on the diagonal.
        return {
            "kind": "permutation",
            "blocks": len(index),
            "index": (index + group.size * torch.arange(len(index))[:, None]).flatten().tolist(),
        }
    matrices = _matrices(group, element)
    return {
        "kind": "rotation" if _orthogonal(matrices) else "basis",
        "blocks": len(matrices),
        "matrix": _small(matrices).tolist(),
    }


def _matrices(group: Group, element: Element) -> Float[Tensor, "batch n n"]:
    """Any element as the matrices by which it acts: what it does to the identity."""
    batch = next(iter(element.values())).shape[: -len(next(iter(group.shapes().values())))]
    eye = (
        torch.eye(group.size, dtype=torch.float64)
        .expand(*batch, group.size, group.size)
        .contiguous()
    )
    return group.act(element, eye, Role.WRITES).reshape(-1, group.size, group.size)


def _small(matrices: Float[Tensor, "batch n n"]) -> Float[Tensor, "rows rows"]:
    """Blocks on the diagonal, pooled by the root of the mean square: it keeps the energy of an orthogonal matrix."""
    whole = torch.block_diag(*matrices).abs()
    if len(whole) <= LARGEST:
        return whole
    return adaptive_avg_pool2d(whole[None, None] ** 2, LARGEST)[0, 0].sqrt()


def _orthogonal(matrix: Float[Tensor, "*batch n n"]) -> bool:
    return bool(
        ((matrix @ matrix.mT - torch.eye(matrix.shape[-1], dtype=matrix.dtype)).abs() < 1e-4).all()
    )
