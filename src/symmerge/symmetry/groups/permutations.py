"""Permutations, with and without signs: hidden units, heads, post-norm streams."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import final

import torch

from symmerge.symmetry.groups.base import (
    Check,
    Coordinates,
    Element,
    Gram,
    Group,
    Shape,
    total,
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
from symmerge.symmetry.notation import Role


@final
@dataclass(frozen=True)
class Permutation(Group):
    """Coordinates change places: new[i] = old[index[i]]."""

    size: int

    @property
    def log10_order(self) -> float:
        return log10_factorial(self.size)

    def shapes(self) -> dict[str, Shape]:
        return {"index": (self.size,)}

    def identity(self, batch: Shape = ()) -> Element:
        return {"index": identity_index(self.size, batch)}

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        return {"index": random_index(self.size, generator, batch)}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {"index": gather(inner["index"], outer["index"])}

    def inverse(self, element: Element) -> Element:
        return {"index": element["index"].argsort(-1)}

    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        return take(x, element["index"])

    def check(self, element: Element) -> Check:
        return check_index(element["index"])

    def nearest(
        self,
        write: Gram,
        read: Gram | None = None,
        ride: Gram | None = None,
        prices: Prices | None = None,
    ) -> Element:
        return {"index": assign(total(write, read, ride), prices)}


@final
@dataclass(frozen=True)
class SignedPermutation(Group):
    """Coordinates change places and signs: new[i] = sign[i] old[index[i]]."""

    size: int

    @property
    def log10_order(self) -> float:
        return log10_factorial(self.size) + self.size * log(2) / log(10)

    def shapes(self) -> dict[str, Shape]:
        return {"index": (self.size,), "sign": (self.size,)}

    def identity(self, batch: Shape = ()) -> Element:
        sign = torch.ones(*batch, self.size, dtype=torch.float64)
        return {"index": identity_index(self.size, batch), "sign": sign}

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        sign = uniform(generator, (*batch, self.size), -1.0, 1.0).sign()
        return {"index": random_index(self.size, generator, batch), "sign": sign}

    def compose(self, outer: Element, inner: Element) -> Element:
        sign = outer["sign"] * gather(inner["sign"], outer["index"])
        return {"index": gather(inner["index"], outer["index"]), "sign": sign}

    def inverse(self, element: Element) -> Element:
        index = element["index"].argsort(-1)
        return {"index": index, "sign": gather(element["sign"], index)}

    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        permuted = take(x, element["index"])
        if role is Role.RIDES:  # a gain follows the permutation, not the sign
            return permuted
        return permuted.mul_(element["sign"].to(x)[..., None])

    def check(self, element: Element) -> Check:
        if not (element["sign"].abs() == 1).all():
            return Check(False, "a sign is neither 1 nor -1")
        return check_index(element["index"])

    def nearest(
        self,
        write: Gram,
        read: Gram | None = None,
        ride: Gram | None = None,
        prices: Prices | None = None,
    ) -> Element:
        score = total(write, read)
        # Signs act on writers and readers only, so the evidence of riding axes keeps its sign.
        index = assign(score.abs() + ride.cross if ride else score.abs(), prices)
        matched = score.gather(-1, index.to(score.device)[..., None]).squeeze(-1)
        return {"index": index, "sign": torch.where(matched < 0, -1.0, 1.0).double().cpu()}
