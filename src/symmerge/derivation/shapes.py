"""Operations that move coordinates and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from torch import Tensor

from symmerge.derivation.following import (
    State,
    request_cut,
)
from symmerge.derivation.steps import Operand, TracedStep, axes_of
from symmerge.derivation.terms import (
    Axis,
    Blocks,
    Met,
    Plain,
    Refine,
    Unfollowed,
    Which,
    blocks,
    chosen,
    length,
    mets,
    regroup,
)
from symmerge.derivation.terms import Versions as Versions


def same(step: TracedStep, x: State, *_: object, **__: object) -> State:
    return x


def view(step: TracedStep, x: State, *_: object) -> State:
    return x.reshaped(regroup(x.axes, step.shape, step.walk.groups))


def transpose(step: TracedStep, x: State, first: int, second: int) -> State:
    axes = list(x.axes)
    axes[first], axes[second] = axes[second], axes[first]
    return x.reshaped(axes)


def turned(step: TracedStep, x: State) -> State:
    return x.reshaped(x.axes[::-1])


def permute(step: TracedStep, x: State, order: Sequence[int]) -> State:
    return x.reshaped([x.axes[at] for at in order])


def unsqueeze(step: TracedStep, x: State, at: int) -> State:
    axes = list(x.axes)
    axes.insert(at % (len(axes) + 1), ())
    return x.reshaped(axes)


def squeeze(step: TracedStep, x: State, at: int | Sequence[int] | None = None) -> State:
    places = range(len(x.axes)) if at is None else [at] if isinstance(at, int) else at
    dropped = {place % len(x.axes) for place in places if length(x.axes[place]) == 1}
    return x.reshaped([axis for i, axis in enumerate(x.axes) if i not in dropped])


def expand(step: TracedStep, x: State, *_: object, **__: object) -> State:
    axes = ((),) * (len(step.shape) - len(x.axes)) + x.axes
    wide = [
        (Plain(size, free=True),) if length(axis) != size else axis
        for axis, size in zip(axes, step.shape, strict=True)
    ]
    return x.reshaped(wide)


def copied(step: TracedStep, x: Operand, source: Operand, *_: object) -> State:
    """Other numbers in the place of a tensor."""
    if not isinstance(source, State):
        raise Unfollowed("constants in the place of what was computed")
    return expand(step, replace(source, parameter=None))


def repeat(step: TracedStep, x: State, times: Sequence[int]) -> State:
    axes = ((),) * (len(times) - len(x.axes)) + x.axes
    pairs = zip(times, axes, strict=True)
    return x.reshaped([(*((Plain(n, free=True),) if n > 1 else ()), *axis) for n, axis in pairs])


def roll(step: TracedStep, x: State, shifts: object, dims: Sequence[int] = ()) -> State:
    """Places that move round; without `dims` all numbers do."""
    if not dims:
        raise Unfollowed("numbers that move round through all axes")
    return _other_places(step, x, {at % len(x.axes) for at in dims})


def constant_pad(step: TracedStep, x: State, sides: Sequence[int], value: float = 0) -> State:
    """Zeros beside the places of some axes; the last axis comes first."""
    wider = {len(x.axes) - 1 - at // 2 for at, count in enumerate(sides) if count}
    if not wider:
        return x
    if value or min(sides) < 0:
        raise Unfollowed("a border that is not zero, or that is cut off")
    step.settle(x)  # a shift does not reach the border
    return _other_places(step, x, wider)


def _other_places(step: TracedStep, x: State, at: set[int]) -> State:
    step.walk.freeze(x.axes[place] for place in at)
    axes = [(Plain(step.shape[i]),) if i in at else axis for i, axis in enumerate(x.axes)]
    return x.reshaped(axes)


def as_strided(
    step: TracedStep, x: State, sizes: Sequence[int], strides: Sequence[int], *_: object
) -> State:
    """The same numbers in the same order, as an average over all places leaves them."""
    lengths = [length(axis) for axis in x.axes]
    dense = [prod(sizes[at + 1 :]) for at in range(len(sizes))]
    moved = (size > 1 and one != own for size, one, own in zip(sizes, strides, dense, strict=True))
    if [*sizes] != lengths or any(moved):
        raise Unfollowed("numbers in another order")
    return x


def part_of(axis: Axis, start: int, end: int) -> Axis:
    """The coordinates of an axis from one place to another."""
    if (start, end) == (0, length(axis)):
        return axis
    if all(isinstance(factor, Plain) for factor in axis):
        return (Plain(end - start, all(getattr(factor, "free", False) for factor in axis)),)
    if len(axis) == 1 and isinstance(axis[0], Blocks):
        begin, kept = 0, []
        for part in axis[0].parts:
            stop = begin + length(part)
            inside = [at - begin for at in (start, end) if begin < at < stop]
            if inside and not all(isinstance(factor, Plain) for factor in part):
                request_cut(part, inside)
            if inside or (start <= begin and stop <= end):
                size = min(stop, end) - max(begin, start)
                kept.append((Plain(size),) if inside else part)
            begin = stop
        return blocks(kept)
    request_cut(axis, [start, end])
    raise Unfollowed("a slice inside a factor")


def strided(step: TracedStep, axis: Axis, stride: int) -> Axis:
    """Every so many coordinates of an axis: one place of its innermost factor."""
    last = axis[-1]
    if all(isinstance(factor, Plain) for factor in axis):
        return (Plain(-(-length(axis) // stride)),)
    if last.size == stride and isinstance(last, Met | Plain):
        step.walk.freeze(((last,),))
        return axis[:-1]
    if last.size % stride:
        raise Unfollowed("a stride that does not divide an axis")
    if isinstance(last, Met):
        raise Refine(last.leaf, ("product", (last.size // stride, stride)))
    raise Unfollowed("a stride across blocks")


def slice_(
    step: TracedStep,
    x: State,
    at: int = 0,
    start: int | None = None,
    end: int | None = None,
    stride: int = 1,
) -> State:
    axes, size = list(x.axes), length(x.axes[at])
    if stride != 1:
        axes[at] = strided(step, axes[at], stride)
        return x.reshaped(axes)
    first = _place(0 if start is None else start, size)
    last = _place(size if end is None else end, size)
    if (first, last) == (0, size):
        return x
    axes[at] = part_of(axes[at], first, last)
    return _indexed(x.reshaped(axes), x, at)


def _place(at: int, size: int) -> int:
    return max(0, at + size) if at < 0 else min(at, size)


def _indexed(result: State, x: State, at: int) -> State:
    """A part of a parameter is not the parameter; one of a stream's places keeps its site."""
    leaves = [met.leaf for met in mets(x.axes[at])]
    if result.site and result.site.leaf in leaves:
        if any(met.leaf == result.site.leaf for met in result.mets()):
            result.site.foldable = result.site.absorbable = False
        result = replace(result, site=None)  # nobody reads what the gain multiplies
    return replace(result, parameter=None, writer=None) if leaves else result


def select(step: TracedStep, x: State, at: int, index: int) -> State:
    at %= len(x.axes)
    axis, others = x.axes[at], [one for i, one in enumerate(x.axes) if i != at]
    if len(axis) == 1 and isinstance(which := axis[0], Which):
        index %= which.size
        return x.reshaped([chosen(one, which.group, index) for one in others])
    first = axis[0] if axis else None
    if isinstance(first, Met) and len(axis) == 1:
        inside = [met for one in others for met in mets(one)]
        if any(
            met.leaf.origin == first.leaf.origin and met.leaf.path > first.leaf.path
            for met in inside
        ):
            raise Refine(first.leaf, ("sum", (1,) * first.size), outer=True)
    step.walk.freeze((_at(axis, index % length(axis)),))
    return _indexed(x.reshaped(others), x, at)


def _at(axis: Axis, index: int) -> Axis:
    """The block of an axis that holds a coordinate."""
    if len(axis) == 1 and isinstance(axis[0], Blocks):
        for part in axis[0].parts:
            if index < length(part):
                return part
            index -= length(part)
    return axis


def unbind(step: TracedStep, x: State, at: int = 0) -> tuple[State, ...]:
    return tuple(select(step, x, at, index) for index in range(length(x.axes[at])))


def split(step: TracedStep, x: State, size: int, at: int = 0) -> tuple[State, ...]:
    total = length(x.axes[at])
    places = range(0, total, size)
    return tuple(slice_(step, x, at, start, min(start + size, total)) for start in places)


def split_sizes(step: TracedStep, x: State, sizes: Sequence[int], at: int = 0) -> tuple[State, ...]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    return tuple(slice_(step, x, at, *ends_) for ends_ in zip(starts, ends, strict=True))


def cat(step: TracedStep, tensors: Sequence[Operand], at: int = 0) -> State:
    sides = [axes_of(one) for one in tensors if not _empty(one)]
    count = len(step.shape)
    at %= count
    axes: list[Axis] = []
    for place in range(count):
        own = [side[place] for side in sides]
        if place == at:
            axes.append(blocks(map(_held, own)))
            continue
        axis = own[0]
        for other in own[1:]:
            axis = step.walk.match(axis, other, "add")
        axes.append(axis)
    sites = {id(one.site): one.site for one in tensors if isinstance(one, State) and one.site}
    if len(sites) > 1 or any(not isinstance(one, State) for one in tensors):
        step.settle(*tensors)
    for one in tensors:
        if isinstance(one, State):
            step.settle_square(one)
    return State(tuple(axes), site=next(iter(sites.values()), None) if len(sites) == 1 else None)


def _empty(one: Operand) -> bool:
    return isinstance(one, Tensor) and one.numel() == 0


def _held(axis: Axis) -> Axis:
    """A part of a longer axis is not the same all along it."""
    if all(isinstance(factor, Plain) for factor in axis):
        return (Plain(length(axis)),)
    return axis


def stack(step: TracedStep, tensors: Sequence[Operand], at: int = 0) -> State:
    first, *others = tensors
    axes = axes_of(first)
    for other in others:
        axes = tuple(
            step.walk.match(a, b, "add") for a, b in zip(axes, axes_of(other), strict=True)
        )
    step.settle(*tensors)
    place = at % len(step.shape)
    return State((*axes[:place], (Plain(len(tensors)),), *axes[place:]))


def gather(step: TracedStep, x: Operand, at: int, places: Operand, **_: object) -> State:
    """Other places along an axis, the same ones for every coordinate of the others."""
    if not isinstance(x, State) or not isinstance(places, Tensor):
        raise Unfollowed("a choice of places that depends on parameters")
    at %= len(x.axes)
    moving = [i for i, axis in enumerate(x.axes) if i != at and any(mets(axis))]
    if any(not (places == places.narrow(i, 0, 1)).all() for i in moving):
        raise Unfollowed("other places for every coordinate")
    step.walk.freeze((x.axes[at],))
    axes = list(x.axes)
    axes[at] = (Plain(step.shape[at]),)
    return _indexed(x.reshaped(axes), x, at)


def chosen_by_size(step: TracedStep, *_: object, **__: object) -> State:
    raise Unfollowed("a choice by size (of experts) looks at all of them")


def _look_up(step: TracedStep, *places: Operand) -> None:
    """Places that depend on parameters (a choice of experts): what they come from stays."""
    for one in places:
        if isinstance(one, State):
            step.settle(one)
            step.walk.freeze(one.axes)


def index(step: TracedStep, x: Operand, places: Sequence[Operand]) -> State:
    if not isinstance(x, State):
        raise Unfollowed("a constant, indexed by what depends on parameters")
    _look_up(step, *places)
    given = [at for at, one in enumerate(places) if one is not None]
    step.walk.freeze(x.axes[at] for at in given)
    kept = [axis for at, axis in enumerate(x.axes) if at not in given]
    count = len(step.shape) - len(kept)
    adjacent = given == list(range(given[0], given[-1] + 1))
    start = given[0] if adjacent else 0
    cut = [(Plain(size),) for size in step.shape[start : start + count]]
    result = x.reshaped([*kept[:start], *cut, *kept[start:]])
    chosen_by_parameters = any(isinstance(one, State) for one in places)
    rows = x.parameter if chosen_by_parameters and given == [0] else None
    return replace(_indexed(result, x, given[0]), rows=rows)


def index_select(step: TracedStep, x: Operand, at: int, places: Operand) -> State:
    if not isinstance(x, State):
        raise Unfollowed("a constant, indexed by what depends on parameters")
    _look_up(step, places)
    step.walk.freeze((x.axes[at],))
    axes = list(x.axes)
    axes[at] = (Plain(step.shape[at]),)
    return _indexed(x.reshaped(axes), x, at)
