"""Permutations with scales: hidden units of ReLU and of gated feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import final

import torch
from torch import Tensor

from symmerge.symmetry.groups.base import (
    Check,
    Coordinates,
    Element,
    Gram,
    Group,
    Shape,
    Tangent,
    uniform,
)
from symmerge.symmetry.groups.indices import (
    Prices,
    assign,
    check_index,
    gather,
    identity_index,
    log10_factorial,
    random_index,
    take,
)
from symmerge.symmetry.groups.scales import best_scale, pairs_at, products_at, scale_costs
from symmerge.symmetry.notation import Role


@final
@dataclass(frozen=True)
class ScaledPermutation(Group):
    """Coordinates change places and scale: new[i] = scale[i] old[index[i]].

    Readers take the reciprocal. `positive` where a negative scale is no symmetry (ReLU); gated
    units allow both signs.
    """

    size: int
    positive: bool = True

    @property
    def dimension(self) -> int:
        return self.size

    @property
    def log10_order(self) -> float:
        return log10_factorial(self.size) + (0 if self.positive else self.size * log(2) / log(10))

    def shapes(self) -> dict[str, Shape]:
        return {"index": (self.size,), "scale": (self.size,)}

    def identity(self, batch: Shape = ()) -> Element:
        return {"index": identity_index(self.size, batch), **self.start(batch)}

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        scale = uniform(generator, (*batch, self.size), -0.5, 0.5).exp()
        if not self.positive:
            scale = scale * uniform(generator, (*batch, self.size), -1.0, 1.0).sign()
        return {"index": random_index(self.size, generator, batch), "scale": scale}

    def compose(self, outer: Element, inner: Element) -> Element:
        scale = outer["scale"] * gather(inner["scale"], outer["index"])
        return {"index": gather(inner["index"], outer["index"]), "scale": scale}

    def inverse(self, element: Element) -> Element:
        index = element["index"].argsort(-1)
        return {"index": index, "scale": 1 / gather(element["scale"], index)}

    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        permuted = take(x, element["index"]) if "index" in element else x
        if role is Role.RIDES:  # the gate follows the permutation, not the scale of the up branch
            return permuted
        scale = element["scale"] if role is Role.WRITES else 1 / element["scale"]
        scale = scale.to(x)[..., None]
        return permuted * scale if permuted is x else permuted.mul_(scale)

    def check(self, element: Element) -> Check:
        scale = element["scale"]
        if (scale == 0).any() or not scale.isfinite().all():
            return Check(False, "a scale is zero or not finite")
        if self.positive and (scale < 0).any():
            return Check(False, "a negative scale, but this activation allows positive ones only")
        return check_index(element["index"])

    def tangent(self) -> dict[str, Shape]:
        return {"stretch": (self.size,)}

    def start(self, batch: Shape = ()) -> Element:
        return {"scale": torch.ones(*batch, self.size, dtype=torch.float64)}

    def retract(self, element: Element, tangent: Tangent) -> Element:
        return {**element, "scale": element["scale"] * tangent["stretch"].exp()}

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        return {"stretch": write.diagonal(dim1=-2, dim2=-1) - read.diagonal(dim1=-2, dim2=-1)}

    def nearest(
        self,
        write: Gram,
        read: Gram | None = None,
        ride: Gram | None = None,
        prices: Prices | None = None,
    ) -> Element:
        if read is None:
            nothing = torch.zeros_like(write.cross)
            read = Gram(nothing, squares=nothing[..., 0])
        cost = scale_costs(write, read, self.positive)
        score = cost.neg_()  # in place: a copy of thousands of units costs 0.3 GB
        index = assign(torch.add(score, ride.cross, alpha=2) if ride else score, prices)
        pairs = pairs_at(index.to(write.cross.device), write, read)
        return {"index": index, "scale": best_scale(pairs, self.positive).double().cpu()}

    def cost(
        self, element: Element, write: Gram, read: Gram | None = None, ride: Gram | None = None
    ) -> float:
        """The squared error an element leaves, up to a constant: to compare two elements."""
        index, scale = (element[name].to(write.cross.device) for name in ("index", "scale"))
        riding = products_at(index, ride).sum() if ride else 0.0
        return float(pairs_at(index, write, read).cost(scale).sum() - 2 * riding)
