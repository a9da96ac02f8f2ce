"""Sums over samples for one activation of two models, and samples that have these very moments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.observation.activations import CENTRED, SCALED, Score
from symmerge.symmetry.groups import linalg
from symmerge.symmetry.notation import Product

SUMS = ("count", "sum_a", "sum_b", "square_a", "square_b", "cross", "inside")


@dataclass
class Moments:
    """Sums over samples for one axis: of both models' coordinates and their squares, of the products between the models, and of the products
    of B's coordinates inside each of its heads (`inside`; a plain axis has none)."""

    axis: Product
    count: Float[Tensor, ""]
    sum_a: Float[Tensor, " a"]
    sum_b: Float[Tensor, " b"]
    square_a: Float[Tensor, " a"]
    square_b: Float[Tensor, " b"]
    cross: Float[Tensor, "a b"]
    inside: Float[Tensor, "heads n n"]

    def add_(self, other: Moments) -> None:
        for part in SUMS:
            getattr(self, part).add_(getattr(other, part).to(self.cross.device))

    @property
    def variances(self) -> tuple[Float[Tensor, " a"], Float[Tensor, " b"]]:
        """Of each model's coordinates; zero for those that never changed."""
        return _variance(self.sum_a, self.square_a, self.count), _variance(
            self.sum_b, self.square_b, self.count
        )

    @property
    def constant(self) -> int:
        """How many coordinates of either model never changed: nothing can be said of them."""
        return sum(int((variance <= 0).sum()) for variance in self.variances)


def _variance(total: Tensor, square: Tensor, count: Tensor) -> Tensor:
    """Rounding leaves a constant coordinate a tiny variance of either sign; it is none."""
    mean = total / count
    variance = square / count - mean.square()
    return torch.where(variance <= 1e-10 * (square / count), 0.0, variance)


def samples_with_moments(
    found: Moments, score: Score
) -> tuple[Float[Tensor, "a b"], Float[Tensor, "b b"]]:
    """A pair of matrices whose product A B' is the score between coordinates, and B B' what B's own moments say."""
    cross, inside = found.cross / found.count, found.inside / found.count
    squares = found.square_a / found.count, found.square_b / found.count
    if score in CENTRED:
        mean_a, mean_b = found.sum_a / found.count, found.sum_b / found.count
        cross = cross - mean_a[:, None] * mean_b
        heads = mean_b.unflatten(0, (len(inside), -1)) if len(inside) else mean_b[:0, None]
        inside = inside - heads[:, :, None] * heads[:, None]
        squares = found.variances
    if score not in SCALED:
        return _rooted(cross, squares[1], inside)
    left, right = (torch.where(square > 0, square.rsqrt(), 0.0) for square in squares)
    cross = left[:, None] * cross * right
    return cross.abs() if score == "absolute" else cross, torch.diag((right > 0).to(cross))


def _rooted(cross: Tensor, squares: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """B as a root of its second moments (inside heads where they are known, else coordinate by coordinate), and A to match."""
    if not len(inside):
        root = squares.sqrt()
        return torch.where(root > 0, cross / root, 0.0), torch.diag(root)
    values, vectors = linalg.eigh(inside)
    # Directions that hold nothing but the rounding of float32 products: with fewer samples than coordinates there are some.
    floor = inside.shape[-1] * torch.finfo(torch.float32).eps * values[:, -1:].clamp_min(0)
    root = torch.where(values > floor, values, 0.0).sqrt()
    columns = cross.unflatten(1, inside.shape[:2]).movedim(1, 0) @ vectors  # head, a, n
    matched = torch.where(root[:, None] > 0, columns / root[:, None], 0.0)
    return matched.movedim(0, 1).flatten(1), torch.block_diag(*(vectors * root[:, None]))
