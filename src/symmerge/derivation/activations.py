"""What a function of single numbers commutes with, measured and never guessed by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

TOLERANCE = 1e-9
FACTORS = (0.01, 0.5, 2.0, 3.0, 50.0)


@dataclass(frozen=True)
class Behaviour:
    """Whether it acts on every number alike, and what it does to scales and signs."""

    elementwise: bool
    degree: Fraction | None = None  # f(s x) = s^degree f(x) for s > 0
    odd: bool = False
    even: bool = False


def behaviour(function: Callable[[Tensor], Tensor]) -> Behaviour:
    """Measured on numbers of both signs and many sizes; on positive ones where it needs those."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    try:
        if not function(x).isfinite().all():
            x = x.abs()
        return _measured(function, x)
    except (RuntimeError, IndexError, TypeError):  # it looks at shapes
        return Behaviour(elementwise=False)


def _measured(function: Callable[[Tensor], Tensor], x: Tensor) -> Behaviour:
    y, order = function(x), torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    table = x.reshape(16, 16)
    alike = y.shape == x.shape and _equal(function(x[order]), y[order])
    if not (alike and _equal(function(table).flatten(), y) and _equal(function(x[:3]), y[:3])):
        return Behaviour(elementwise=False)
    both = bool((x < 0).any())
    return Behaviour(
        elementwise=True,
        degree=_degree(function, x, y),
        odd=both and _equal(function(-x), -y),
        even=both and _equal(function(-x), y),
    )


def _degree(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Fraction | None:
    large = y.abs() > 1e-6
    if not large.any():
        return None
    ratio = (function(2 * x)[large] / y[large]).abs().median()
    degree = Fraction(float(ratio.log2())).limit_denominator(4)
    powers = [factor ** float(degree) for factor in FACTORS]
    scaled = zip(FACTORS, powers, strict=True)
    return degree if all(_equal(function(s * x) / power, y) for s, power in scaled) else None


def _equal(a: Tensor, b: Tensor) -> bool:
    size = b.abs().clamp_min(1e-3)
    return a.shape == b.shape and bool(((a - b).abs() <= TOLERANCE * size).all())


@lru_cache(maxsize=256)
def behaviour_of(name: str, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]):
    """Of an aten operation with these further arguments: TENSOR marks the place of the tensor."""
    packet = getattr(torch.ops.aten, name)

    def function(x: Tensor) -> Tensor:
        filled = tuple(x if one is TENSOR else _number(one, x) for one in args)
        return packet(*filled, **dict(kwargs)).to(x)  # comparisons give truth values

    return behaviour(function)


@dataclass(frozen=True)
class Scalar:
    """A tensor without axes, where an operation takes no number in its place."""

    value: float


def _number(one: object, like: Tensor) -> object:
    return like.new_tensor(one.value) if isinstance(one, Scalar) else one


TENSOR = "the tensor"
