"""Balance: share the size of a circuit evenly between the two sides of its space."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.models.canonical.step import Computed, derived
from symmerge.models.circuits import circuit, computed_once, with_pieces
from symmerge.models.model import Model
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    RotaryPairs,
    ScaledPermutation,
    linalg,
)
from symmerge.symmetry.notation import Piece, Role


def balance(model: Model) -> Model:
    """In every space where only products matter, give writers and readers the same size; heads go to the basis of their SVD."""
    rebalanced = {name for name, space in model.spec.hidden.items() if type(space.group) in BALANCE}
    if not rebalanced:
        return model
    sides = computed_once(partial(_balanced_pieces, model))
    computed: Computed = {}
    for name in rebalanced:
        for met in model.spec.occurrences(name):
            if met.role is not Role.RIDES:
                computed[met.piece.tensor] = partial(
                    with_pieces,
                    model.spec,
                    met.piece.tensor,
                    model.weights.__getitem__,
                    sides,
                    rebalanced,
                )
    return derived(
        model, computed, "balance", f"writers and readers of {len(rebalanced)} spaces balanced"
    )


def _balanced_pieces(model: Model, space: str) -> dict[Piece, Tensor]:
    group, found = model.spec.spaces[space].group, circuit(model, space)
    x, y = BALANCE[type(group)](group, found.x.double(), found.y.double())
    return found.pieces(x.to(found.x), y.to(found.y))


Pair = tuple[Float[Tensor, "b n x"], Float[Tensor, "b n y"]]


def balance_circuit(group: Group, x: Float[Tensor, "b n x"], y: Float[Tensor, "b n y"]) -> Pair:
    """x'y = U S V' without forming it: QR both thin factors, SVD the small core."""
    (x_basis, x_core), (y_basis, y_core) = linalg.qr(x.mT), linalg.qr(y.mT)
    u, s, vh = linalg.svd(x_core @ y_core.mT, full_matrices=False)
    root = s.sqrt()[..., None]
    pad = (0, 0, 0, x.shape[-2] - s.shape[-1])
    grow = torch.nn.functional.pad
    return grow(root * (x_basis @ u).mT, pad), grow(root * (y_basis @ vh.mT).mT, pad)


def _balance_rows(x: Tensor, y: Tensor) -> Pair:
    sizes = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    scale = torch.where(
        (sizes[0] > 0) & (sizes[1] > 0),
        (sizes[1] / sizes[0].clamp_min(1e-300)).sqrt(),
        torch.ones_like(sizes[0]),
    )
    return x * scale, y / scale


def _balance_scales(group: Group, x: Tensor, y: Tensor) -> Pair:
    return _balance_rows(x, y)


def _balance_rotary(group: Group, x: Tensor, y: Tensor) -> Pair:
    assert isinstance(group, RotaryPairs)
    turned, rest = [], []
    for side in (x, y):
        first, second, others = group.split(side)
        turned.append(torch.cat([first, second], -1))
        rest.append(others)
    turned = _balance_rows(*turned)
    rest = balance_circuit(group, *rest) if group.rest.size else rest
    half = turned[0].shape[-1] // 2, turned[1].shape[-1] // 2
    queries, keys = (side.split(width, -1) for side, width in zip(turned, half, strict=True))
    return group.join(queries[0], queries[1], rest[0]), group.join(keys[0], keys[1], rest[1])


BALANCE: dict[type[Group], Callable[[Any, Tensor, Tensor], Pair]] = {
    GeneralLinear: balance_circuit,
    ScaledPermutation: _balance_scales,
    RotaryPairs: _balance_rotary,
}
