"""Queries and keys under rotary positions: one complex number per pair, GL for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
from einops import rearrange
from jaxtyping import Complex, Float
from torch import Tensor

from symmerge.symmetry.groups import linalg
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
from symmerge.symmetry.groups.general_linear import GeneralLinear
from symmerge.symmetry.groups.matrices import constant_gain
from symmerge.symmetry.notation import Role

Layout = Literal["halves", "interleaved"]


@final
@dataclass(frozen=True)
class RotaryPairs(Group):
    """A complex number u per pair: queries times u, keys times 1 / conj(u).

    Frequencies differ, so pairs never swap. The first `rotary` coordinates are paired as
    (j, j + rotary/2) in halves (Llama, NeoX) or (2j, 2j + 1) interleaved (GPT-J). The others are
    not rotated (partial rotary) and may change basis freely.
    """

    size: int
    rotary: int
    layout: Layout = "halves"

    @property
    def pairs(self) -> int:
        return self.rotary // 2

    @property
    def rest(self) -> GeneralLinear:
        """The group of the coordinates that are not rotated."""
        return GeneralLinear(self.size - self.rotary)

    @property
    def dimension(self) -> int:
        return 2 * self.pairs + self.rest.dimension

    def shapes(self) -> dict[str, Shape]:
        return {"pair": (self.pairs, 2), "rest": (self.rest.size, self.rest.size)}

    def identity(self, batch: Shape = ()) -> Element:
        unit = torch.ones(*batch, self.pairs, dtype=torch.complex128)
        return _element(unit, self.rest.identity(batch)["matrix"])

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        size = uniform(generator, (*batch, self.pairs), -0.5, 0.5).exp()
        angle = uniform(generator, (*batch, self.pairs), -torch.pi, torch.pi)
        return _element(torch.polar(size, angle), self.rest.random(generator, batch)["matrix"])

    def compose(self, outer: Element, inner: Element) -> Element:
        return _element(_complex(outer) * _complex(inner), outer["rest"] @ inner["rest"])

    def inverse(self, element: Element) -> Element:
        return _element(1 / _complex(element), linalg.inv(element["rest"]))

    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        if role is Role.RIDES:
            return constant_gain(self.name, x)
        pair = element["pair"]
        if role is Role.READS:  # 1 / conj(u) = u / |u|^2
            pair = pair / pair.square().sum(-1, keepdim=True)
        real, imaginary = pair.to(x)[..., None, :].unbind(-1)
        first, second, others = self.split(x)
        turned = (
            torch.addcmul(real * first, imaginary, second, value=-1),
            torch.addcmul(imaginary * first, real, second),
        )
        return self.join(*turned, self.rest.act(_rest(element), others, role))

    def check(self, element: Element) -> Check:
        size = _complex(element).abs()
        if not size.isfinite().all() or (size < 1e-8).any() or (size > 1e8).any():
            return Check(False, "a complex scale is zero, huge or not finite")
        return self.rest.check({"matrix": element["rest"]})

    def tangent(self) -> dict[str, Shape]:
        return {"stretch": (self.pairs,), "turn": (self.pairs,), **self.rest.tangent()}

    def start(self, batch: Shape = ()) -> Element:
        return {**self.identity(batch), "dual": self.rest.start(batch)["dual"]}

    def retract(self, element: Element, tangent: Tangent) -> Element:
        real, imaginary = element["pair"].unbind(-1)
        size, cosine, sine = tangent["stretch"].exp(), tangent["turn"].cos(), tangent["turn"].sin()
        turned = real * cosine - imaginary * sine, real * sine + imaginary * cosine
        pair = torch.stack([size * turned[0], size * turned[1]], -1)
        rest = dict(self.rest.retract(_rest(element), tangent))
        return {"pair": pair, "rest": rest.pop("matrix"), **rest}

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        # Queries move by stretch + i turn, keys by -stretch + i turn.
        queries, keys = self._inner(write), self._inner(read)
        others = slice(self.rotary, None)
        rest = self.rest.tangent_gradient(*(side[..., others, others] for side in (write, read)))
        return {"stretch": queries.real - keys.real, "turn": queries.imag + keys.imag, **rest}

    def project(self, element: Element) -> tuple[Element, int]:
        rest, bad = self.rest.project({"matrix": element["rest"]})
        return {"pair": element["pair"], "rest": rest["matrix"]}, bad

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        zero = torch.zeros_like(write.cross)
        keys = read or Gram(zero, zero)
        u = best_complex(
            self._inner(write.cross), self._inner(keys.cross), self._norm(write), self._norm(keys)
        )
        rest = self.rest.nearest(self._others(write), read and self._others(read))
        return _element(u.to(torch.complex128).cpu(), rest["matrix"].double().cpu())

    def _others(self, gram: Gram) -> Gram:
        others = slice(self.rotary, None)
        return Gram(gram.cross[..., others, others], gram.needs_right()[..., others, others])

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First and second coordinates of the pairs, and the unrotated ones: views of x."""
        turned, others = x[..., : self.rotary, :], x[..., self.rotary :, :]
        if self.layout == "halves":
            return turned[..., : self.pairs, :], turned[..., self.pairs :, :], others
        return turned[..., 0::2, :], turned[..., 1::2, :], others

    def join(self, first: Tensor, second: Tensor, others: Tensor) -> Tensor:
        """The reverse of `split`."""
        if self.layout == "halves":
            return torch.cat([first, second, others], -2)
        pairs = torch.stack([first, second], -2)
        return torch.cat([rearrange(pairs, "... pair two m -> ... (pair two) m"), others], -2)

    def _columns(self) -> tuple[slice, slice]:
        if self.layout == "halves":
            return slice(0, self.pairs), slice(self.pairs, self.rotary)
        return slice(0, self.rotary, 2), slice(1, self.rotary, 2)

    def _inner(self, cross: Tensor) -> Complex[Tensor, "*batch pairs"]:
        """<b, a> of the complex coordinates: the sum of a conj(b)."""
        first, second = self._columns()
        block = [
            cross[..., i, j].diagonal(dim1=-2, dim2=-1)
            for i in (first, second)
            for j in (first, second)
        ]
        return torch.complex(block[0] + block[3], block[2] - block[1])

    def _norm(self, gram: Gram) -> Float[Tensor, "*batch pairs"]:
        squares = gram.needs_right().diagonal(dim1=-2, dim2=-1)
        first, second = self._columns()
        return squares[..., first] + squares[..., second]


def _complex(element: Element) -> Tensor:
    # A copy: a view of a memory-mapped file may be misaligned, and complex arithmetic crashes.
    return torch.complex(*element["pair"].double().unbind(-1))


def _rest(element: Element) -> Element:
    return {"matrix": element["rest"]} | ({"dual": element["dual"]} if "dual" in element else {})


def _element(u: Tensor, rest: Tensor) -> Element:
    return {"pair": torch.view_as_real(u).contiguous(), "rest": rest}


def best_complex(
    query: Complex[Tensor, "*batch"],
    key: Complex[Tensor, "*batch"],
    query_norm: Float[Tensor, "*batch"],
    key_norm: Float[Tensor, "*batch"],
) -> Complex[Tensor, "*batch"]:
    """Minimise |qA - u qB|^2 + |kA - kB / conj(u)|^2 over u, for all heads and pairs at once.

    With u = r e^(it) the best t is the phase of r <qB,qA> + <kB,kA> / r. What remains is smooth in
    y = log r, and every minimum lies between the two one-sided optima: a grid finds its basin,
    golden section narrows it down to rounding.
    """
    tiny = torch.finfo(query_norm.dtype).tiny
    query_norm, key_norm = query_norm.clamp_min(tiny), key_norm.clamp_min(tiny)

    def cost(y: Tensor) -> Tensor:
        r = y.exp()
        return r**2 * query_norm + key_norm / r**2 - 2 * (r * query + key / r).abs()

    query_end = (query.abs().clamp_min(tiny) / query_norm).log()
    key_end = -(key.abs().clamp_min(tiny) / key_norm).log()
    ends = torch.stack([query_end, key_end, (key_norm / query_norm).log() / 4])
    low, high = ends.amin(0).clamp(-12, 12) - 0.5, ends.amax(0).clamp(-12, 12) + 0.5
    grid = torch.linspace(0, 1, 65, dtype=low.dtype, device=low.device).reshape(-1, *[1] * low.ndim)
    points = low + grid * (high - low)
    best = torch.stack([cost(y) for y in points]).argmin(0)
    width = (high - low) / 64
    centre = points.gather(0, best[None]).squeeze(0)
    y = _golden(cost, centre - width, centre + width)
    return torch.polar(y.exp(), (y.exp() * query + key / y.exp()).angle())


def _golden(cost: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Golden-section search per entry, to the square root of rounding; then a parabolic step."""
    ratio = (5**0.5 - 1) / 2
    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        go_left = cost(left) < cost(right)
        low, high = torch.where(go_left, low, left), torch.where(go_left, right, high)
    y = (low + high) / 2
    step = 1e-3
    before, here, after = cost(y - step), cost(y), cost(y + step)
    bend = before - 2 * here + after
    vertex = y - step * (after - before) / (2 * bend.clamp_min(torch.finfo(y.dtype).tiny))
    refined = torch.where(bend > 0, vertex, y)
    return torch.where(cost(refined) <= cost(y), refined, y)
