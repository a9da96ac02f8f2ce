"""Permutations, with and without signs and scales: groups whose matrices have one entry per row and column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, lgamma, log
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symmerge.symmetry.groups.base import Check, Element, Gram, Group, is_transposed, total, uniform
from symmerge.symmetry.notation import Role

PAIRS_AT_ONCE = (
    1 << 16
)  # of units whose scales are sought together: a handful of float64 arrays that fit in the cache
NEWTON_STEPS = 9
LARGEST_LOG_SCALE = (
    12.0  # a unit scaled by e^12 would not survive float16; the gate would refuse it anyway
)


def take(
    x: Float[Tensor, "*batch n m"], index: Int[Tensor, "*#batch n"]
) -> Float[Tensor, "*batch n m"]:
    """Row i of the result is row index[i] of x; a new tensor in the layout of x."""
    if index.ndim == 1:
        index = index.to(x.device)
        return (
            x.mT.gather(-1, index.expand(x.mT.shape)).mT
            if is_transposed(x)
            else x.index_select(-2, index)
        )
    flat, rows = x.flatten(0, -3), index.to(x.device).expand(x.shape[:-1]).flatten(0, -2)
    return flat[torch.arange(len(flat), device=x.device)[:, None], rows].reshape(x.shape)


def _log10_factorial(n: int) -> float:
    return lgamma(n + 1) / log(10)


def _identity(n: int, batch: tuple[int, ...]) -> Tensor:
    return torch.arange(n).expand(*batch, n).clone()


def _shuffle(n: int, generator: torch.Generator, batch: tuple[int, ...]) -> Tensor:
    return torch.rand((*batch, n), generator=generator, dtype=torch.float64).argsort(-1)


def _is_permutation(index: Tensor) -> Check:
    if index.dtype != torch.int64:
        return Check(False, f"index holds {index.dtype}, not whole numbers")
    ok = torch.equal(
        index.sort(-1).values, torch.arange(index.shape[-1], device=index.device).expand_as(index)
    )
    return Check(
        ok,
        "" if ok else "index is not a permutation: some coordinates are used twice, others never",
    )


def assign(score: Float[Tensor, "*batch n n"]) -> Int[Tensor, "*batch n"]:
    """The permutation with the largest total score."""
    from scipy.optimize import linear_sum_assignment  # large, and only needed here

    # What a row or a column has in common decides nothing, but costs the solver: without it, it took a quarter of the time.
    score = score.detach().double()
    score = score - score.mean(-1, keepdim=True) - score.mean(-2, keepdim=True)
    flat = score.reshape(-1, *score.shape[-2:]).cpu().numpy()
    chosen = [torch.as_tensor(linear_sum_assignment(block, maximize=True)[1]) for block in flat]
    return torch.stack(chosen).reshape(score.shape[:-1])


def _gather(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.to(values.device))


@final
@dataclass(frozen=True)
class Permutation(Group):
    """Coordinates change places: new[i] = old[index[i]]."""

    size: int

    @property
    def log10_order(self) -> float:
        return _log10_factorial(self.size)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"index": (self.size,)}

    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        return {"index": _identity(self.size, batch)}

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        return {"index": _shuffle(self.size, generator, batch)}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {"index": _gather(inner["index"], outer["index"])}

    def inverse(self, element: Element) -> Element:
        return {"index": element["index"].argsort(-1)}

    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        return take(x, element["index"])

    def check(self, element: Element) -> Check:
        return _is_permutation(element["index"])

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        return {"index": assign(total(write, read, ride))}


@final
@dataclass(frozen=True)
class SignedPermutation(Group):
    """Coordinates change places and signs: new[i] = sign[i] old[index[i]]."""

    size: int

    @property
    def log10_order(self) -> float:
        return _log10_factorial(self.size) + self.size * log(2) / log(10)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"index": (self.size,), "sign": (self.size,)}

    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        return {
            "index": _identity(self.size, batch),
            "sign": torch.ones(*batch, self.size, dtype=torch.float64),
        }

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        sign = uniform(generator, (*batch, self.size), -1, 1).sign()
        return {"index": _shuffle(self.size, generator, batch), "sign": sign}

    def compose(self, outer: Element, inner: Element) -> Element:
        sign = outer["sign"] * _gather(inner["sign"], outer["index"])
        return {"index": _gather(inner["index"], outer["index"]), "sign": sign}

    def inverse(self, element: Element) -> Element:
        index = element["index"].argsort(-1)
        return {"index": index, "sign": _gather(element["sign"], index)}

    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        moved = take(x, element["index"])
        if role is Role.RIDES:  # a gain follows the permutation, not the sign
            return moved
        return moved.mul_(element["sign"].to(x)[..., None])

    def check(self, element: Element) -> Check:
        if not (element["sign"].abs() == 1).all():
            return Check(False, "a sign is neither 1 nor -1")
        return _is_permutation(element["index"])

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        score = total(write, read)
        # a sign is free where the coordinate writes and reads, not where it rides
        index = assign(score.abs() + ride.cross if ride else score.abs())
        met = score.gather(-1, index.to(score.device)[..., None]).squeeze(-1)
        return {"index": index, "sign": torch.where(met < 0, -1.0, 1.0).double().cpu()}


@final
@dataclass(frozen=True)
class ScaledPermutation(Group):
    """Coordinates change places and scale: new[i] = scale[i] old[index[i]]; readers take the reciprocal.

    `positive` where a negative scale is no symmetry (ReLU); gated units allow both signs.
    """

    size: int
    positive: bool = True

    @property
    def dimension(self) -> int:
        return self.size

    @property
    def log10_order(self) -> float:
        return _log10_factorial(self.size) + (0 if self.positive else self.size * log(2) / log(10))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"index": (self.size,), "scale": (self.size,)}

    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        return {
            "index": _identity(self.size, batch),
            "scale": torch.ones(*batch, self.size, dtype=torch.float64),
        }

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        scale = uniform(generator, (*batch, self.size), -0.5, 0.5).exp()
        if not self.positive:
            scale = scale * uniform(generator, (*batch, self.size), -1, 1).sign()
        return {"index": _shuffle(self.size, generator, batch), "scale": scale}

    def compose(self, outer: Element, inner: Element) -> Element:
        scale = outer["scale"] * _gather(inner["scale"], outer["index"])
        return {"index": _gather(inner["index"], outer["index"]), "scale": scale}

    def inverse(self, element: Element) -> Element:
        index = element["index"].argsort(-1)
        return {"index": index, "scale": 1 / _gather(element["scale"], index)}

    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        moved = take(x, element["index"]) if "index" in element else x
        if role is Role.RIDES:  # the gate follows the permutation, not the scale of the up branch
            return moved
        scale = element["scale"] if role is Role.WRITES else 1 / element["scale"]
        scale = scale.to(x)[..., None]
        return moved * scale if moved is x else moved.mul_(scale)

    def check(self, element: Element) -> Check:
        scale = element["scale"]
        if (scale == 0).any() or not scale.isfinite().all():
            return Check(False, "a scale is zero or not finite")
        if self.positive and (scale < 0).any():
            return Check(
                False,
                "a negative scale, but this activation is homogeneous for positive scales only",
            )
        return _is_permutation(element["index"])

    def tangent(self) -> dict[str, tuple[int, ...]]:
        return {"stretch": (self.size,)}

    def start(self, batch: tuple[int, ...] = ()) -> Element:
        return {"scale": self.identity(batch)["scale"]}

    def retract(self, element: Element, along: Mapping[str, Tensor]) -> Element:
        return {**element, "scale": element["scale"] * along["stretch"].exp()}

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        return {"stretch": write.diagonal(dim1=-2, dim2=-1) - read.diagonal(dim1=-2, dim2=-1)}

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        if read is None:
            read = Gram(torch.zeros_like(write.cross), torch.zeros_like(write.cross))
        cost = scale_costs(write, read, self.positive)
        index = assign(2 * ride.cross - cost if ride else -cost)
        return {
            "index": index,
            "scale": _scales_of(index.to(write.cross.device), write, read, self.positive)
            .double()
            .cpu(),
        }

    def cost(
        self, element: Element, write: Gram, read: Gram | None = None, ride: Gram | None = None
    ) -> float:
        """What an element leaves of the squared error, less what no element changes: to compare two of them."""
        index, scale = (element[part].to(write.cross.device) for part in ("index", "scale"))
        p, w = _met(write, index)
        q, r = _met(read, index) if read else (torch.zeros_like(p), torch.zeros_like(w))
        rides = _met(ride, index)[1].sum() if ride else 0.0
        return float(_scale_cost(scale, p, q, w, r).sum() - 2 * rides)


def scale_costs(write: Gram, read: Gram, positive: bool) -> Float[Tensor, "*batch n n"]:
    """For every pair (i, j): the least of |a_i - s b_j|^2 + |c_i - d_j / s|^2 over s, less what no s changes, to about one part in a thousand.

    With B's units balanced (what they write and read is equally long) the best scale of nearly every pair is near 1 or -1, and one Newton
    step in its logarithm finds it; the few others get the full search.
    """
    tiny = torch.finfo(torch.float32).tiny
    p, q = (gram.needs_right().diagonal(dim1=-2, dim2=-1)[..., None, :] for gram in (write, read))
    balance, length = (
        (q.clamp_min(tiny) / p.clamp_min(tiny)).pow(0.25).float(),
        (p * q).sqrt().float(),
    )
    cost = torch.empty_like(write.cross, dtype=torch.float32)
    for here in _some_rows(cost):
        u, v = write.cross[here].float().mul_(balance), read.cross[here].float().div_(balance)
        both, apart = u + v, u - v
        far = (
            torch.maximum(both.abs(), apart.abs()) > 3 * length
        )  # the cost need not be convex there
        if not positive:
            sign = both.sign()
            both, apart = both.mul_(sign), apart.mul_(sign)
        far |= apart.abs() > length
        step = apart / (4 * length - both).abs_().clamp_min_(tiny)
        s = step.clamp_(-1, 1).exp_()
        inverse = s.reciprocal()
        # u s + v / s, from the sum and the difference of u and v
        linear = (s + inverse).mul_(both).add_((s - inverse).mul_(apart))
        found = (s.square() + inverse.square()).mul_(length).sub_(linear)
        if far.any():
            p_, q_, w, r = (
                side.expand_as(cost)[here][far] for side in (p, q, write.cross, read.cross)
            )
            found[far] = _scale_cost(_best_scale(p_, q_, w, r, positive), p_, q_, w, r).float()
        cost[here] = found
    return cost


def _some_rows(pairs: Tensor) -> Iterator[tuple]:
    """A few rows at a time, so that the work stays in the cache."""
    n = pairs.shape[-1]
    rows = max(1, PAIRS_AT_ONCE // (n * max(1, pairs.numel() // n**2)))
    return ((..., slice(at, at + rows), slice(None)) for at in range(0, n, rows))


def _met(gram: Gram, index: Tensor) -> tuple[Tensor, Tensor]:
    """Squared lengths of B's units, and products with A's, for the pairs (i, index[i])."""
    length = (
        torch.zeros(())
        if gram.right is None
        else gram.right.diagonal(dim1=-2, dim2=-1).gather(-1, index)
    )
    return length, gram.cross.gather(-1, index[..., None]).squeeze(-1)


def _scales_of(index: Tensor, write: Gram, read: Gram, positive: bool) -> Tensor:
    """The best scales of the pairs (i, index[i]) alone."""
    (p, w), (q, r) = _met(write, index), _met(read, index)
    return _best_scale(p, q, w, r, positive)


def _scale_cost(s: Tensor, p: Tensor, q: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """|a - s b|^2 + |c - d / s|^2 less |a|^2 + |c|^2, where p = |b|^2, q = |d|^2, w = <a, b>, r = <c, d>."""
    return s * (s * p - 2 * w) + (q / s - 2 * r) / s


def _best_scale(p: Tensor, q: Tensor, w: Tensor, r: Tensor, positive: bool) -> Tensor:
    """The s with the least `_scale_cost`.

    The stationary points are roots of a quartic; in t = log |s| Newton steps find the minimum from the best of three starts (balance, the
    writer's own optimum, the reader's) and, where s may be negative, the better sign.
    """
    tiny = torch.finfo(w.dtype).tiny
    low, high = exp(-LARGEST_LOG_SCALE), exp(LARGEST_LOG_SCALE)
    p_, q_ = p.clamp_min(tiny), q.clamp_min(tiny)
    sign = torch.ones_like(w)
    starts = [(q_ / p_).pow(0.25).expand_as(w), w.abs() / p_, q_ / r.abs().clamp_min(tiny)]
    best, s = torch.full_like(w, torch.inf), torch.ones_like(w)
    for start in starts:
        start = start.clamp(low, high)
        for direction in (1.0,) if positive else (1.0, -1.0):
            value = _scale_cost(start, p, q, direction * w, direction * r)
            better = value < best
            best, s, sign = (
                torch.where(better, value, best),
                torch.where(better, start, s),
                torch.where(better, direction, sign),
            )
    w, r = sign * w, sign * r
    t, first = s.log(), s
    for _ in range(NEWTON_STEPS):
        inverse = 1 / s
        up, down, linear, recip = s * s * p, inverse * inverse * q, s * w, inverse * r
        slope = 2 * (up - linear - down + recip)
        bend = 4 * (up + down) - 2 * (linear + recip)
        t = (t - (slope / bend.abs().clamp_min(tiny)).clamp(-1, 1)).clamp(
            -LARGEST_LOG_SCALE, LARGEST_LOG_SCALE
        )
        s = t.exp()
    return sign * torch.where(_scale_cost(s, p, q, w, r) <= best, s, first)
