"""Permutations, signs, and both: hidden units, heads, post-norm streams, normed queries."""

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
        sign = _random_signs(generator, (*batch, self.size))
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
        signs = _check_signs(element["sign"])
        return check_index(element["index"]) if signs.ok else signs

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
        return {"index": index, "sign": _signs_of(matched)}


@final
@dataclass(frozen=True)
class Signs(Group):
    """Coordinates change their signs and stay in place: new[i] = sign[i] old[i]."""

    size: int

    @property
    def log10_order(self) -> float:
        return self.size * log(2) / log(10)

    def shapes(self) -> dict[str, Shape]:
        return {"sign": (self.size,)}

    def identity(self, batch: Shape = ()) -> Element:
        return {"sign": torch.ones(*batch, self.size, dtype=torch.float64)}

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        return {"sign": _random_signs(generator, (*batch, self.size))}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {"sign": outer["sign"] * inner["sign"]}

    def inverse(self, element: Element) -> Element:
        return {"sign": element["sign"].clone()}

    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        return x if role is Role.RIDES else x * element["sign"].to(x)[..., None]

    def check(self, element: Element) -> Check:
        return _check_signs(element["sign"])

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        score = total(write, read).diagonal(dim1=-2, dim2=-1)
        return {"sign": _signs_of(score)}


def _random_signs(generator: torch.Generator, shape: Shape) -> Tensor:
    return uniform(generator, shape, -1.0, 1.0).sign()


def _signs_of(score: Tensor) -> Tensor:
    return torch.where(score < 0, -1.0, 1.0).double().cpu()


def _check_signs(sign: Tensor) -> Check:
    ok = bool((sign.abs() == 1).all())
    return Check(ok, "" if ok else "a sign is neither 1 nor -1")
