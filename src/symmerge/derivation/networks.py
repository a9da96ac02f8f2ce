"""What convolutional networks are made of: norms over batches and groups, pooling, weight norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from symmerge.derivation.following import LENGTH, MEAN, POINTWISE, Mode, State
from symmerge.derivation.operations import _powers, _shifted
from symmerge.derivation.steps import Operand, TracedStep, matched
from symmerge.derivation.terms import Axis, Plain, Unfollowed, mets, regroup

CHANNELS = 1


def batch_norm(
    step: TracedStep,
    x: State,
    gain: Operand,
    shift: Operand,
    mean: Operand,
    variance: Operand,
    *rest: Any,
) -> tuple[State, ...]:
    """With statistics of its own: an affine map of every channel, whose gain may scale."""
    if rest and rest[0] is True:
        raise Unfollowed("a norm with the statistics of its input")
    step.settle(x)
    result = x
    if isinstance(variance, State):
        shifted = _shifted(step, variance)  # by epsilon: neither scales nor signs
        variance = State(tuple(_powers(axis, 0) for axis in shifted.axes))
    steps: tuple[tuple[Operand, Mode], ...] = (
        *((mean, "add"), (variance, "multiply")),
        *((gain, "multiply"), (shift, "add")),
    )
    for one, mode in steps:
        if one is not None:
            along = _along_channels(one, len(x.axes))
            result = State(matched(step, result, along, mode))
    for met in mets(result.axes[CHANNELS]):
        step.walk.mark(met, POINTWISE)
    return result, State(((),)), State(((),))


def _along_channels(one: Operand, count: int) -> Operand:
    after = count - CHANNELS - 1
    if isinstance(one, State):
        return one.reshaped([(), *one.axes, *[()] * after])
    return one.reshape(1, -1, *[1] * after) if isinstance(one, Tensor) else one


def group_norm(
    step: TracedStep,
    x: State,
    gain: Operand,
    shift: Operand,
    rows: int,
    channels: int,
    places: int,
    groups: int,
    *_: Any,
) -> tuple[State, ...]:
    """LayerNorm over each group of channels and all places."""
    step.settle(x)
    shape, inside = step.shape, (groups, channels // groups)
    split = regroup(x.axes, (shape[0], *inside, *shape[2:]), step.walk.groups)
    for axis in split[CHANNELS + 1 :]:
        for met in mets(axis):
            step.walk.still(met, LENGTH, MEAN)
    result = State((split[0], *(_powers(axis, 0, odd=True) for axis in split[1:])))
    steps: tuple[tuple[Operand, Mode], ...] = ((gain, "multiply"), (shift, "add"))
    for one, mode in steps:
        if isinstance(one, State):
            along = [(), *regroup(one.axes, inside, step.walk.groups), *[()] * (len(shape) - 2)]
            result = State(matched(step, result, one.reshaped(along), mode))
    whole = regroup(result.axes, shape, step.walk.groups)
    return State(whole), State(((),)), State(((),))


def weight_norm(step: TracedStep, x: State, length: Operand, at: int = 0) -> tuple[State, ...]:
    """Directions of unit length, times a length of their own."""
    step.settle(x)
    axes: list[Axis] = []
    for place, axis in enumerate(x.axes):
        for met in mets(axis):
            if place != at % len(x.axes):
                step.walk.vanish(met.scale, "scale")
                step.walk.mark(met, LENGTH)
        axes.append(_powers(axis, 0, odd=True))
    result = State(matched(step, State(tuple(axes)), length, "multiply"))
    return result, State(((),) * len(axes))


def pooled_mean(places: int) -> Any:
    """A mean, or a mixture, of places: every channel alike."""

    def rule(step: TracedStep, x: State, *_: object, **__: object) -> State:
        step.settle(x)  # a shift does not reach a border
        return _other_places(step, x, places)

    return rule


def pooled_largest(places: int) -> Any:
    """The largest of some places: every channel alike, and no signs."""

    def rule(step: TracedStep, x: State, *_: object, **__: object) -> tuple[State, ...]:
        step.settle(x)
        for met in x.mets():
            step.walk.mark(met, POINTWISE)
            step.walk.vanish(met.sign, "sign")
        result = _other_places(step, x, places)
        return result, State(((),) * len(result.axes))

    return rule


def _other_places(step: TracedStep, x: State, places: int) -> State:
    step.walk.freeze(x.axes[-places:])
    after = ((Plain(size),) if size != 1 else () for size in step.shape[-places:])
    return State((*x.axes[:-places], *after))


def largest(step: TracedStep, x: State, at: Any = None, keep: bool = False) -> tuple[State, ...]:
    """The largest along an axis, whose own coordinates may change places, and do not scale."""
    if at is None or not isinstance(at, int):
        raise Unfollowed("the largest of several axes")
    step.settle(x)
    at %= len(x.axes)
    for place, axis in enumerate(x.axes):
        for met in mets(axis):
            step.walk.mark(met, POINTWISE)
            step.walk.vanish(met.sign, "sign")
            if place == at:
                step.walk.vanish(met.scale, "scale")
    gone = [met.leaf.number for met in mets(x.axes[at])]
    kept = [met for place, axis in enumerate(x.axes) if place != at for met in mets(axis)]
    step.walk.apart |= {(met.leaf.number, number) for met in kept for number in gone}
    axes = [() if i == at else axis for i, axis in enumerate(x.axes) if keep or i != at]
    return State(tuple(axes)), State(((),) * len(axes))


def prelu(step: TracedStep, x: State, slope: Operand) -> State:
    """A leaky ReLU whose slopes are parameters, which ride along."""
    step.settle(x, slope)
    result = State(matched(step, x, slope, "gain"))
    for met in (*x.mets(), *(slope.mets() if isinstance(slope, State) else ())):
        step.walk.mark(met, POINTWISE)
        step.walk.vanish(met.sign, "sign")
    return result
