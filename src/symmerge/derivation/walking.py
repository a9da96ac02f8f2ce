"""Follow a recording from the parameters to the outputs, cutting axes until they fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor
from torch.utils._pytree import tree_map

from symmerge.derivation.activations import TENSOR, Scalar, behaviour_of
from symmerge.derivation.following import POINTWISE, Following, State
from symmerge.derivation.operations import TracedStep, _powers
from symmerge.derivation.recording import Operation, Recording, Value
from symmerge.derivation.rules import RULES
from symmerge.derivation.terms import Cut, Plain, Refine, Unfollowed, refined
from symmerge.errors import UnsupportedModel

Cuts = dict[str, list[Cut]]
MOST_CUTS = 1000
PICKS = {"slice", "select", "narrow", "split", "split_with_sizes", "unbind", "index_select"}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=^)\d+(?=\.)")


@dataclass(frozen=True)
class Followed:
    """A recording that was followed: the cut of every axis, and what is known of every leaf."""

    walk: Following
    parameters: Mapping[str, State]
    used: frozenset[str]
    unreached: frozenset[int]


def follow(recording: Recording, ties: Mapping[str, str]) -> Followed:
    """Follow a recording; tied parameters are one."""
    cuts: Cuts = {name: list(value.shape) for name, value in recording.parameters.items()}
    operations = recording.needed()
    for _ in range(MOST_CUTS):
        try:
            return _follow(recording, operations, cuts, ties)
        except Refine as request:
            _cut(cuts, request)
    raise UnsupportedModel(f"axes are cut in more than {MOST_CUTS} ways: no table was found")


def _cut(cuts: Cuts, request: Refine) -> None:
    """Cut one axis, and those of other layers that are cut as it is."""
    (name, at), path = request.leaf.origin, request.leaf.path
    if request.outer and not path:
        raise UnsupportedModel(f"{name}: a slice of axis {at} cannot be expressed")
    old, template = cuts[name][at], NUMBER.sub("#", name)
    new = refined(old, path, request.cut, outer=request.outer)
    for other, own in cuts.items():
        if NUMBER.sub("#", other) == template and own[at : at + 1] == [old]:
            own[at] = new


def _follow(
    recording: Recording, operations: list[Operation], cuts: Cuts, ties: Mapping[str, str]
) -> Followed:
    walk = Following()
    parameters = {name: walk.parameter(name, cut) for name, cut in cuts.items()}
    states = {value.number: parameters[name] for name, value in recording.parameters.items()}
    for alias, target in ties.items():
        _tie(walk, parameters[alias], parameters[target])
    reached: set[int] = set()
    for operation in operations:
        results = _apply(walk, operation, states)
        for value, state in zip(operation.results, results, strict=False):
            if value is not None:
                states[value.number] = state
        operands = () if operation.name in PICKS else operation.inputs()
        met = (*(states[value.number] for value in operands), *results)
        reached |= {one.leaf.number for state in met for one in state.mets()}
    for output in recording.outputs:
        state = states[output.number]
        if state.site:
            state.site.foldable = False
        walk.freeze(state.axes)
    read = {value.number for operation in operations for value in operation.inputs()}
    read |= {value.number for value in recording.outputs}
    used = {name for name, value in recording.parameters.items() if value.number in read}
    used |= {ties[name] for name in used & ties.keys()}
    return Followed(walk, parameters, frozenset(used), _unreached(walk, reached))


def _unreached(walk: Following, reached: Iterable[int]) -> frozenset[int]:
    """Leaves of parts of parameters that the example inputs do not reach: longer ones may."""
    roots = {walk.root(number) for number in reached}
    parts = [one for one in walk.leaves if one.path and walk.root(one.number) not in roots]
    walk.notes += [
        f"{part.origin[0]}: {part.size} coordinates of axis {part.origin[1]} are not reached by"
        " the example inputs: they stay as they are; give longer inputs to have them followed"
        for part in parts
    ]
    return frozenset(part.number for part in parts)


def _tie(walk: Following, alias: State, target: State) -> None:
    """Tied tensors scale alike; one may be written where the other is read."""
    roles = list(walk.equations["role"])
    for one, other in zip(alias.axes, target.axes, strict=True):
        walk.match(one, other, "add")
    walk.equations["role"] = roles


def _apply(walk: Following, operation: Operation, states: Mapping[int, State]) -> tuple[State, ...]:
    def given(one: Any) -> Any:
        return states[one.number] if isinstance(one, Value) else one

    step = TracedStep(walk, operation)
    args, kwargs = tree_map(given, (operation.args, dict(operation.kwargs)))
    try:
        rule = RULES.get(operation.name)
        result = rule(step, *args, **kwargs) if rule else None
        if result is None:
            result = _pointwise(step, args, kwargs)
    except (Unfollowed, TypeError, IndexError, KeyError, AttributeError, ValueError) as error:
        return _frozen(step, args, kwargs, error)
    return result if isinstance(result, tuple) else (result,)


def _pointwise(step: TracedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> State:
    """A function of single numbers: what it commutes with is measured."""
    args = tuple(Scalar(one.item()) if _is_number(one) else one for one in args)
    tensors = [one for one in args if isinstance(one, State | Tensor)]
    if len(tensors) != 1 or not isinstance(tensors[0], State):
        raise Unfollowed("no rule for it")
    x, name = tensors[0], step.operation.name
    described = tuple(TENSOR if one is x else one for one in args)
    known = behaviour_of(name.removesuffix("_") or name, described, tuple(kwargs.items()))
    if not known.elementwise:
        raise Unfollowed("no rule for it")
    step.settle(x)
    for met in x.mets():
        step.walk.mark(met, POINTWISE)
        if known.degree is None:
            step.walk.vanish(met.scale, "scale")
        if not (known.odd or known.even):
            step.walk.vanish(met.sign, "sign")
    degree = known.degree or 0
    return State(tuple(_powers(axis, degree, odd=known.odd) for axis in x.axes))


def _is_number(one: object) -> TypeGuard[Tensor]:
    return isinstance(one, Tensor) and one.ndim == 0


def _frozen(
    step: TracedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> tuple[State, ...]:
    """What reaches an operation that is not understood stays as it is."""
    reached: list[State] = []
    tree_map(lambda one: reached.append(one) if isinstance(one, State) else None, (args, kwargs))
    step.settle(*reached)
    for state in reached:
        step.walk.freeze(state.axes)
    if any(True for state in reached for _ in state.mets()):
        operation = step.operation
        reason = error if isinstance(error, Unfollowed) else "no rule for it"
        step.walk.notes.append(
            f"{operation.name} in {operation.place or 'the forward'} is not understood"
            f" ({reason}): what reaches it stays as it is"
        )
    return tuple(_plain(result.shape if result else ()) for result in step.operation.results)


def _plain(shape: Iterable[int]) -> State:
    return State(tuple((Plain(size),) if size != 1 else () for size in shape))
