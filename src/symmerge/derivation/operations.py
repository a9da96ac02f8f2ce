"""What each operation does to axes: the rules by which a recording is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from symmerge.derivation.following import (
    LENGTH,
    MEAN,
    POINTWISE,
    ZERO,
    Site,
    State,
    constant_axes,
    times,
)
from symmerge.derivation.steps import Operand, TracedStep, matched
from symmerge.derivation.terms import (
    Axis,
    Blocks,
    Leaf,
    Met,
    Unfollowed,
    length,
    mets,
)
from symmerge.derivation.terms import Versions as Versions


def add(step: TracedStep, x: Operand, y: Operand, alpha: float = 1, **_: object) -> State:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, State) and _nothing(other):
            return replace(one, axes=matched(step, one, other, "multiply"))
        if isinstance(one, State) and isinstance(other, float | int):
            return _shifted(step, one)
    return _sum(step, x, y)


def _nothing(one: Operand) -> bool:
    if isinstance(one, State):
        return one.zero
    if isinstance(one, Tensor):
        return not one.any()
    return isinstance(one, float | int) and one == 0


def _shifted(step: TracedStep, x: State) -> State:
    step.settle(x)
    for met in x.mets():
        step.walk.still(met, MEAN)
    return State(x.axes)


def _sum(step: TracedStep, x: Operand, y: Operand) -> State:
    axes = matched(step, x, y, "add")
    for one, other in ((x, y), (y, x)):
        if isinstance(one, State) and isinstance(other, State) and other.parameter:
            if one.site and not one.site.shift and not one.site.readers and _is_row(other):
                one.site.shift = other.parameter
                step.settle_square(one)
                return State(axes, site=one.site)
            if one.writer and _is_row(other):
                return State(axes, writer=one.writer)
    return State(axes, site=step.settle_linear(x, y))


def _is_row(x: State) -> bool:
    return sum(length(axis) > 1 for axis in x.axes) == 1


def multiply(step: TracedStep, x: Operand, y: Operand) -> State:
    if isinstance(x, State) and isinstance(y, State):
        if x is y:
            return _square(step, x)
        for one, other in ((x, y), (y, x)):
            if other.parameter and not one.parameter and list(other.mets()):
                return _gained(step, one, other)
        step.settle(x, y)
        return State(matched(step, x, y, "multiply"))
    one, other = (x, y) if isinstance(x, State) else (y, x)
    assert isinstance(one, State)
    if isinstance(other, Tensor) and other.ndim and not other.any():
        return State(constant_axes(torch.zeros(step.shape)), zero=True)
    if isinstance(other, Tensor) and other.numel() > 1 and any(True for _ in one.mets()):
        kept = _along(one, other)
        if not kept:
            step.settle(one)
        return State(matched(step, one, other, "multiply"), site=one.site if kept else None)
    return replace(one, axes=matched(step, one, other, "multiply"), square=one.square)


def _along(x: State, constant: Tensor) -> bool:
    """Whether a constant is the same along every axis with leaves."""
    shape = (1,) * (len(x.axes) - constant.ndim) + tuple(constant.shape)
    pairs = zip(x.axes, constant_axes(constant.reshape(shape)), strict=True)
    return all(
        length(other) == 1 or all(getattr(factor, "free", False) for factor in other)
        for axis, other in pairs
        if any(True for _ in mets(axis))
    )


def _square(step: TracedStep, x: State) -> State:
    if x.site:
        x.site.foldable = False
    step.settle_square(x)
    axes = tuple(_powers(axis, 2, even=True) for axis in x.axes)
    return State(axes, square=True)


def _powers(axis: Axis, degree: Any, *, even: bool = False, odd: bool = False) -> Axis:
    """The axis of a function of single coordinates that is homogeneous."""

    def changed(met: Met) -> Met:
        sign = met.sign if odd else ZERO
        return met.with_exponents(scale=times(met.scale, degree) if degree else ZERO, sign=sign)

    return each(axis, changed)


def each(axis: Iterable[Any], function: Callable[[Met], Met]) -> Axis:
    """The axis with every leaf's exponents changed."""
    result: list[Any] = []
    for factor in axis:
        if isinstance(factor, Met):
            result.append(function(factor))
        elif isinstance(factor, Blocks):
            result.append(Blocks(tuple(each(part, function) for part in factor.parts)))
        elif isinstance(factor, Versions):
            options = tuple(each(part, function) for part in factor.options)
            result.append(Versions(factor.group, options))
        else:
            result.append(factor)
    return tuple(result)


def _gained(step: TracedStep, x: State, gain: State) -> State:
    """A parameter that multiplies pointwise: it rides along, and may be folded."""
    step.settle(x)
    axes = matched(step, x, gain, "gain")
    own = [list(mets(axis)) for axis in gain.axes if length(axis) > 1]
    site = None
    if len(own) == 1 and gain.parameter and _blocks_of_leaves(gain):
        *others, last = own[0]  # visible coordinates of a stream come first
        root = step.walk.root(last.leaf.number)  # other places of the stream fold with the last
        shown = [met for met in others if step.walk.root(met.leaf.number) != root]
        site = Site(gain.parameter, _as_met(step, axes, last), writer=x.writer)
        step.walk.sites.append(site)
    else:
        shown = list(gain.mets())
    for met in shown:
        step.walk.mark(met, POINTWISE)
    return State(axes, site=site)


def _blocks_of_leaves(gain: State) -> bool:
    """Whether a gain lies along one axis of single leaves, side by side."""
    (axis,) = (axis for axis in gain.axes if length(axis) > 1)
    parts = axis[0].parts if isinstance(axis[0], Blocks) else (axis,)
    return len(axis) == 1 and all(len(part) == 1 and isinstance(part[0], Met) for part in parts)


def _as_met(step: TracedStep, axes: Iterable[Axis], gain: Met) -> Leaf:
    """The leaf by which a tensor names the space of a gain."""
    root = step.walk.root(gain.leaf.number)
    reached = (met.leaf for axis in axes for met in mets(axis))
    return next((one for one in reached if step.walk.root(one.number) == root), gain.leaf)


def divide(step: TracedStep, x: Operand, y: Operand, **_: object) -> State:
    if not isinstance(y, State):
        return multiply(step, x, y)
    step.settle(x, y)
    inverted = State(tuple(_powers(axis, -1, odd=True) for axis in y.axes))
    if not isinstance(x, State):
        for met in y.mets():
            step.walk.mark(met, POINTWISE)
        return State(matched(step, inverted, x, "multiply"))
    return State(matched(step, x, inverted, "multiply"))


def power(step: TracedStep, x: Operand, exponent: Operand) -> Any:
    if isinstance(x, State) and exponent == 2:
        return _square(step, x)
    return None  # as any other function of single numbers


def where(step: TracedStep, condition: Operand, x: Operand, y: Operand) -> State:
    step.settle(condition, x, y)
    one, other = (x, y) if isinstance(x, State) else (y, x)
    axes = one.axes if isinstance(one, State) and _nothing(other) else matched(step, x, y, "add")
    return State(matched(step, State(axes), condition, "multiply"))


def extreme(step: TracedStep, x: Operand, y: Operand) -> State | None:
    """The larger or the smaller of two, number by number: it knows positive scales, no signs."""
    if not (isinstance(x, State) and isinstance(y, State)):
        return None  # beside a constant it is a function of single numbers
    step.settle(x, y)
    for met in (*x.mets(), *y.mets()):
        step.walk.mark(met, POINTWISE)
        step.walk.vanish(met.sign, "sign")
    return State(matched(step, x, y, "add"))


def masked_fill(step: TracedStep, x: State, mask: Operand, value: Operand) -> State:
    return where(step, mask, value, x)


# reductions, norms, softmax


def reduced(step: TracedStep, x: State, at: Any = None, keep: bool = False, **_: object) -> State:
    places = _places(x, at)
    for place, axis in enumerate(x.axes):
        for met in mets(axis):
            if place in places and x.square:
                step.walk.vanish(met.scale, "scale")
                step.walk.mark(met, LENGTH)
            elif place in places:
                step.walk.still(met, MEAN)
            elif x.square:
                step.walk.mark(met, POINTWISE)
    return _reduced(step, x, places, keep)


def _places(x: State, at: Any) -> set[int]:
    if at is None or at == []:
        return set(range(len(x.axes)))
    return {one % len(x.axes) for one in ([at] if isinstance(at, int) else at)}


def _reduced(step: TracedStep, x: State, places: set[int], keep: bool) -> State:
    gone = [met.leaf.number for place in places for met in mets(x.axes[place])]
    kept = [m for i, axis in enumerate(x.axes) if i not in places for m in mets(axis)]
    step.walk.apart |= {(met.leaf.number, number) for met in kept for number in gone}
    if x.site and gone:
        x.site.foldable = False
    axes = [() if i in places else axis for i, axis in enumerate(x.axes) if keep or i not in places]
    return State(tuple(axes), site=None if gone else x.site)


def spread(step: TracedStep, x: State, at: Any = None, *rest: Any, **options: Any) -> Any:
    """Variances and standard deviations."""
    step.settle(x)
    places = _places(x, at)
    for place in places:
        for met in mets(x.axes[place]):
            step.walk.still(met, LENGTH, MEAN)
    keep = bool(options.get("keepdim", rest[-1] if rest and isinstance(rest[-1], bool) else False))
    result = _reduced(step, replace(x, site=None), places, keep)
    return (result, result) if len(step.operation.results) == 2 else result


def vector_norm(
    step: TracedStep, x: State, order: float = 2, at: Any = None, keep: bool = False, **_: Any
) -> State:
    if order != 2:
        raise Unfollowed(f"a norm of order {order}")
    step.settle(x)
    for place in _places(x, at):
        for met in mets(x.axes[place]):
            step.walk.vanish(met.scale, "scale")
            step.walk.mark(met, LENGTH)
    return _reduced(step, replace(x, site=None), _places(x, at), keep)


def layer_norm(
    step: TracedStep, x: State, shape: Sequence[int], gain: Operand, shift: Operand, epsilon: float
) -> tuple[State, ...]:
    result = _normed(step, x, len(shape), mean=True)
    result = _gained(step, result, gain) if isinstance(gain, State) else result
    if result.site and x.embedding:
        result.site.embedding, result.site.epsilon = x.embedding, epsilon
    result = _sum(step, result, shift) if isinstance(shift, State) else result
    statistics = State((*x.axes[: -len(shape)], *((),) * len(shape)))
    return result, statistics, statistics


def rms_norm(
    step: TracedStep, x: State, shape: Sequence[int], gain: Operand, *_: Any
) -> tuple[State, ...]:
    result = _normed(step, x, len(shape), mean=False)
    result = _gained(step, result, gain) if isinstance(gain, State) else result
    return result, State((*x.axes[: -len(shape)], *((),) * len(shape)))


def _normed(step: TracedStep, x: State, count: int, *, mean: bool) -> State:
    step.settle_linear(x)
    for axis in x.axes[-count:]:
        for met in mets(axis):
            step.walk.vanish(met.scale, "scale")
            step.walk.mark(met, LENGTH)
            if mean:
                step.walk.still(met, MEAN)
    still = [_powers(axis, 0, odd=not mean) for axis in x.axes[-count:]]
    return State((*x.axes[:-count], *still))


def softmax(step: TracedStep, x: State, *_: object, **__: object) -> State:
    step.settle(x)
    for met in x.mets():
        step.walk.still(met, POINTWISE)
    return State(tuple(_powers(axis, 0) for axis in x.axes))


def negated(step: TracedStep, x: State) -> State:
    return replace(x, square=x.square)
