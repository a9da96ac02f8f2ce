"""Sums of products: matrices, convolutions, embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from symmerge.derivation.following import (
    INNER,
    State,
)
from symmerge.derivation.steps import Operand, TracedStep, axes_of, matched
from symmerge.derivation.terms import (
    Axis,
    Plain,
    Unfollowed,
    length,
    mets,
)
from symmerge.derivation.terms import Versions as Versions


def contracted(step: TracedStep, x: Operand, y: Operand, at: int, other: int) -> None:
    """Contract an axis of x with one of y; a product with zeros, where a state begins, is zero."""
    if any(isinstance(side, Tensor) and not side.any() for side in (x, y)):
        return
    one, two = axes_of(x)[at], axes_of(y)[other]
    plain = any(isinstance(side, State) and (side.parameter or side.rows) for side in (x, y))
    for side, opposite, axis, place in ((x, y, one, at), (y, x, two, other)):
        if not isinstance(side, State):
            continue
        step.settle_square(side)
        _read_by(side, opposite, axis)
        for met in mets(axis):
            if not plain:
                step.walk.mark(met, INNER)
            elif side.parameter or side.rows:
                step.walk.readers.add(met.leaf.number)
            rest = [m for i, kept in enumerate(side.axes) if i != place for m in mets(kept)]
            step.walk.apart |= {(m.leaf.number, met.leaf.number) for m in rest}
    step.walk.match(one, two, "contract" if plain else "inner")


def _read_by(side: State, opposite: Operand, axis: Axis) -> None:
    """A linear map may take the gain of what it reads."""
    if side.site:
        reader = (opposite.parameter or opposite.rows) if isinstance(opposite, State) else None
        if reader and any(met.leaf == side.site.leaf for met in mets(axis)):
            side.site.readers.append(reader)
        else:
            side.site.foldable = side.site.absorbable = False


def mm(step: TracedStep, x: Operand, y: Operand) -> State:
    contracted(step, x, y, 1, 0)
    return State((axes_of(x)[0], axes_of(y)[1]), writer=_writer(x, y))


def _writer(x: Operand, y: Operand) -> str | None:
    names = [one.parameter for one in (x, y) if isinstance(one, State) and one.parameter]
    return names[0] if len(names) == 1 else None


def mv(step: TracedStep, x: Operand, y: Operand) -> State:
    contracted(step, x, y, 1, 0)
    return State((axes_of(x)[0],))


def addmm(step: TracedStep, bias: Operand, x: Operand, y: Operand, **_: object) -> State:
    product = mm(step, x, y)
    step.settle(bias)
    return replace(product, axes=matched(step, product, bias, "add"))


def bmm(step: TracedStep, x: Operand, y: Operand) -> State:
    contracted(step, x, y, 2, 1)
    batch = step.walk.match(axes_of(x)[0], axes_of(y)[0], "multiply")
    return State((batch, axes_of(x)[1], axes_of(y)[2]))


def baddbmm(step: TracedStep, added: Operand, x: Operand, y: Operand, **_: object) -> State:
    product = bmm(step, x, y)
    step.settle(added)
    return State(matched(step, product, added, "add"))


def convolution(step: TracedStep, x: Operand, weight: State, bias: Operand, *rest: Any) -> State:
    groups, flipped = rest[-1], rest[3]
    spatial = tuple((Plain(size),) for size in step.shape[2:])
    step.walk.freeze(axes_of(x)[2:])
    step.walk.freeze(weight.axes[2:])
    if groups == 1:  # a transposed one has its inputs first
        contracted(step, x, weight, 1, 0 if flipped else 1)
        channels = weight.axes[1 if flipped else 0]
    elif groups == length(weight.axes[0]) == length(axes_of(x)[1]) and not flipped:
        step.settle(x)
        channels = step.walk.match(axes_of(x)[1], weight.axes[0], "multiply")
    else:
        raise Unfollowed("a grouped convolution")
    result = State((axes_of(x)[0], channels, *spatial), writer=weight.parameter)
    if isinstance(bias, State):
        channels = step.walk.match(channels, bias.axes[0], "add")
    return result


def embedding(step: TracedStep, weight: State, index: Tensor, *_: object) -> State:
    step.walk.freeze(weight.axes[:1])
    axes = (*((Plain(n),) for n in index.shape), *weight.axes[1:])
    return State(axes, embedding=weight.parameter)
