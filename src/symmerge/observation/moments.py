"""Sums over samples for one activation of two models, and samples that reproduce them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.observation.activations import CENTRED, SCALED, Score
from symmerge.symmetry.groups import linalg
from symmerge.symmetry.notation import Product


@dataclass(frozen=True)
class Moments:
    """Sums over samples for one axis, added to in place.

    `sum_*` and `square_*` are each model's coordinates and their squares, `cross` the products
    between the models, `inside` those of B's coordinates inside each of its heads (if any).
    """

    axis: Product
    count: Float[Tensor, ""]
    sum_a: Float[Tensor, " a"]
    sum_b: Float[Tensor, " b"]
    square_a: Float[Tensor, " a"]
    square_b: Float[Tensor, " b"]
    cross: Float[Tensor, "a b"]
    inside: Float[Tensor, "heads n n"]

    @staticmethod
    def zeros(
        axis: Product, cross: torch.Size, inside: torch.Size, device: torch.device
    ) -> Moments:
        """Sums over no samples, in float64."""
        a, b = cross
        shapes = {"count": (), "sum_a": a, "sum_b": b, "square_a": a, "square_b": b}
        shapes |= {"cross": cross, "inside": inside}
        zeros = {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in shapes.items()
        }
        return Moments(axis, **zeros)

    def sums(self) -> dict[str, Tensor]:
        """All sums by name."""
        return {name: getattr(self, name) for name in SUMS}

    def to(self, device: torch.device) -> Moments:
        return Moments(self.axis, **{name: total.to(device) for name, total in self.sums().items()})

    def clone(self) -> Moments:
        return Moments(self.axis, **{name: total.clone() for name, total in self.sums().items()})

    def add_(self, sums: Mapping[str, Tensor]) -> None:
        """Add sums over more samples."""
        for name, total in self.sums().items():
            total.add_(sums[name].to(total.device))

    @property
    def variances(self) -> tuple[Float[Tensor, " a"], Float[Tensor, " b"]]:
        """The variances of each model's coordinates; zero for constant ones."""
        a = _variance(self.sum_a, self.square_a, self.count)
        return a, _variance(self.sum_b, self.square_b, self.count)

    @property
    def constant(self) -> int:
        """How many coordinates of either model never change, and so carry no information."""
        return sum(int((variance <= 0).sum()) for variance in self.variances)


SUMS = tuple(item.name for item in fields(Moments) if item.name != "axis")


def problem_of(sums: Mapping[str, Tensor]) -> str | None:
    """Why these cannot be the sums of an activation: shapes, types or values; None if they can."""
    cross, inside = sums["cross"], sums["inside"]
    if cross.ndim != 2 or inside.ndim != 3:
        return "products that are no matrices"
    a, b = cross.shape
    shapes = {"count": (), "sum_a": (a,), "sum_b": (b,), "square_a": (a,), "square_b": (b,)}
    for name, total in sums.items():
        if total.dtype != torch.float64 or total.shape != shapes.get(name, total.shape):
            return f"{name} of {total.dtype} {list(total.shape)}"
        if not total.isfinite().all():
            return f"{name} with NaN or infinite values"
    heads, rows, columns = inside.shape
    if rows != columns or heads * rows not in (0, b):
        return f"inside of shape {list(inside.shape)} for {b} coordinates"
    if sums["count"] < 1 or (sums["square_a"] < 0).any() or (sums["square_b"] < 0).any():
        return "no samples, or negative squares"
    return None


def _variance(total: Tensor, square: Tensor, count: Tensor) -> Tensor:
    """The variance; zero for constant coordinates, where rounding leaves a tiny value."""
    mean = total / count
    variance = square / count - mean.square()
    return torch.where(variance <= 1e-10 * (square / count), 0.0, variance)


def samples_with_moments(
    moments: Moments, score: Score
) -> tuple[Float[Tensor, "a b"], Float[Tensor, "b b"]]:
    """Matrices A, B with A B' the score between coordinates, and B B' as B's own moments say."""
    cross, inside = moments.cross / moments.count, moments.inside / moments.count
    squares = moments.square_a / moments.count, moments.square_b / moments.count
    if score in CENTRED:
        mean_a, mean_b = moments.sum_a / moments.count, moments.sum_b / moments.count
        cross = cross - mean_a[:, None] * mean_b
        heads = mean_b.unflatten(0, (len(inside), -1)) if len(inside) else mean_b[:0, None]
        inside = inside - heads[:, :, None] * heads[:, None]
        squares = moments.variances
    if score not in SCALED:
        return _roots(cross, squares[1], inside)
    left, right = (torch.where(square > 0, square.rsqrt(), 0.0) for square in squares)
    cross = left[:, None] * cross * right
    return cross.abs() if score == "absolute" else cross, torch.diag((right > 0).to(cross))


def _roots(cross: Tensor, squares: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """B as a root of its second moments (per head where known, else diagonal), and A to match."""
    if not len(inside):
        root = squares.sqrt()
        return torch.where(root > 0, cross / root, 0.0), torch.diag(root)
    values, vectors = linalg.eigh(inside)
    # With fewer samples than coordinates, some directions hold only float32 rounding.
    floor = inside.shape[-1] * torch.finfo(torch.float32).eps * values[:, -1:].clamp_min(0)
    root = torch.where(values > floor, values, 0.0).sqrt()
    columns = cross.unflatten(1, inside.shape[:2]).movedim(1, 0) @ vectors  # head, a, n
    matched = torch.where(root[:, None] > 0, columns / root[:, None], 0.0)
    return matched.movedim(0, 1).flatten(1), torch.block_diag(*(vectors * root[:, None]))
