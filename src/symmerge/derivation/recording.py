"""Run a module once and record every operation that a parameter reaches, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from symmerge.derivation.memory import SharedMemory, in_part
from symmerge.errors import UnsupportedModel

Shape = tuple[int, ...]
Outputs = Callable[[Any], list[Tensor]]
LOOKS_AT_VALUES = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
# They give a tensor another shape in its place, and write nothing.
OTHER_SHAPES = {"transpose_", "t_", "unsqueeze_", "squeeze_", "detach_", "as_strided_"}
# Of a tensor they look at its shape alone: what they return depends on no parameter.
LOOKS_AT_SHAPES = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty"),
}


@dataclass(frozen=True)
class Value:
    """A tensor that depends on parameters, by its number in the recording."""

    number: int
    shape: Shape


@dataclass(frozen=True)
class Operation:
    """One aten operation: its arguments (`Value` where a parameter reaches them), and results."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Value | None, ...]
    place: str

    def inputs(self) -> list[Value]:
        """The tracked arguments, in order."""
        flat, _ = tree_flatten((self.args, dict(self.kwargs)))
        return [one for one in flat if isinstance(one, Value)]

    @property
    def signature(self) -> tuple[object, ...]:
        """What must not depend on the data."""
        return self.name, tuple(result and result.shape for result in self.results)


@dataclass
class Recording:
    """All operations between the parameters and the outputs."""

    parameters: dict[str, Value]
    operations: list[Operation] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    def needed(self) -> list[Operation]:
        """The operations that the outputs depend on."""
        wanted, kept = {value.number for value in self.outputs}, []
        for operation in reversed(self.operations):
            if wanted & {result.number for result in operation.results if result}:
                kept.append(operation)
                wanted |= {value.number for value in operation.inputs()}
        return kept[::-1]


def record(
    module: nn.Module, tensors: Mapping[str, Tensor], inputs: Mapping[str, Any], outputs: Outputs
) -> Recording:
    """Run a module with these parameters, each name a tensor of its own, and record it."""
    recorder, places = _Recorder(tensors), _Places(module)
    recorder.place = places
    with places, running(), recorder:
        try:
            answers = outputs(call(module, tensors, inputs))
        except UnsupportedModel:
            raise
        except Exception as error:  # torch and user code raise every kind
            raise UnsupportedModel(_stopped(module, recorder, places.deepest, error)) from error
    recording = recorder.recording
    recorder.refuse_stale(answers)
    for tensor in answers:
        if (value := recorder.value_of(tensor)) is not None:
            recording.outputs.append(value)
    if not recording.outputs:
        raise UnsupportedModel(
            f"{type(module).__name__}: no output depends on a parameter: return tensors of floats"
        )
    return recording


def call(module: nn.Module, tensors: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> Any:
    """The module's result with these parameters; names that share a tensor may differ here."""
    positional, named = arguments(inputs)
    return torch.func.functional_call(module, dict(tensors), positional, named, tie_weights=False)


def tensors_of(module: nn.Module, *, buffers: bool = True) -> dict[str, Tensor]:
    """Parameters, and buffers after them; those of a module that is used twice have one name."""
    owners = [(f"{name}." if name else "", one) for name, one in module.named_modules()]
    own = [(prefix, one._parameters) for prefix, one in owners]
    own += [(prefix, one._buffers) for prefix, one in owners] if buffers else []
    return {
        f"{prefix}{key}": tensor
        for prefix, tensors in own
        for key, tensor in tensors.items()
        if tensor is not None
    }


def arguments(inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs by position, which are named by their number, and by name."""
    named = {name: value for name, value in inputs.items() if not name.isdigit()}
    return tuple(inputs[name] for name in inputs if name.isdigit()), named


def reason_of(error: Exception) -> str:
    """What another library, or a user's code, says of an error, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(" .:")


@contextmanager
def running() -> Iterator[None]:
    """Without gradients, fused attention, or precision below float64."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), InDouble():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class InDouble(TorchDispatchMode):
    """Conversions of float64 to a coarser type do nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **in_double(args, kwargs or {}))


def in_double(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments without a coarser type than that of the tensors."""
    dtype = kwargs.get("dtype")
    if dtype is None or not dtype.is_floating_point or not args:
        return kwargs
    if isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
        return {**kwargs, "dtype": torch.float64}
    return kwargs


def _stopped(module: nn.Module, recorder: _Recorder, place: str, error: Exception) -> str:
    reason = reason_of(error)
    last = f" (the last operation was {recorder.last})" if recorder.last else ""
    return (
        f"{type(module).__name__} cannot be traced: it stopped in {place or 'its forward'}{last}:"
        f" {reason}; give sm.derive example inputs that it takes"
    )


class _Places:
    """The path of the module that is being run."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.stack, self.deepest, self.handles = module, [""], "", []

    def __call__(self) -> str:
        return self.stack[-1]

    def __enter__(self) -> None:
        for name, child in self.module.named_modules():
            self.handles += [
                child.register_forward_pre_hook(lambda *_, name=name: self._enter(name)),
                child.register_forward_hook(lambda *_: self._leave()),
            ]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, name: str) -> None:
        self.stack.append(name)
        self.deepest = name

    def _leave(self) -> None:
        self.stack.pop()
        self.deepest = self.stack[-1]


class _Recorder(TorchDispatchMode):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.place: Callable[[], str] = str
        self.last = ""
        self.values: dict[int, Value] = {}
        self.kept: list[object] = []  # so that no id is used twice
        self.memory = SharedMemory()
        self.recording = Recording({name: self._new(tensor) for name, tensor in tensors.items()})

    def _new(self, tensor: Tensor) -> Value:
        value = Value(len(self.kept), tuple(tensor.shape))
        self.kept.append(tensor)
        self.values[id(tensor)] = value
        self.memory.add(tensor)
        return value

    def value_of(self, tensor: object) -> Value | None:
        """The number of a tensor that depends on parameters."""
        return self.values.get(id(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = in_double(args, kwargs or {})
        name, place = func._schema.name.removeprefix("aten::"), self.place()
        self.last = name
        flat, _ = tree_flatten((args, kwargs))
        tracked = any(self.value_of(one) for one in flat if isinstance(one, Tensor))
        tracked = tracked and name not in LOOKS_AT_SHAPES
        if tracked:
            self._refuse(name, place, args, [one for one in flat if isinstance(one, Tensor)])
        before = tree_map(self._argument, (args, kwargs)) if tracked else None
        result = func(*args, **kwargs)
        if before is not None:
            flat, _ = tree_flatten(result)
            results = tuple(self._new(one) if isinstance(one, Tensor) else None for one in flat)
            operation = Operation(name, before[0], before[1], results, place)
            self.recording.operations.append(operation)
            if _in_place(name):
                where = f"in {place}" if place else "in its forward"
                self.memory.written(args[0], f"the operation {name} {where}")
        return result

    def _argument(self, one: object) -> object:
        if not isinstance(one, Tensor):
            return one
        value = self.value_of(one)
        if value is None:
            self.kept.append(one)
        return one if value is None else value

    def _refuse(
        self, name: str, place: str, args: tuple[Any, ...], operands: Sequence[Tensor]
    ) -> None:
        where = f"in {place}" if place else "in its forward"
        if name in LOOKS_AT_VALUES:
            raise UnsupportedModel(
                f"the operation {name} {where} reads values that depend on parameters: control flow"
                " that depends on the data has no table; replace it by torch.where"
            )
        # a part that was followed itself may change, if nobody reads the whole afterwards
        unknown = _in_place(name) and in_part(args[0]) and not self.value_of(args[0])
        self.refuse_stale(operands, f"the operation {name} {where}" if unknown else None)

    def refuse_stale(self, tensors: Sequence[Tensor], written: str | None = None) -> None:
        """Refuse tensors of which a part was `written` by way of another one."""
        stale = (self.memory.stale.get(id(one)) for one in tensors)
        if written := written or next(filter(None, stale), None):
            raise UnsupportedModel(
                f"{written} writes into a part of a tensor, which cannot be followed: build the"
                " tensor with torch.cat or torch.stack"
            )


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and name not in OTHER_SHAPES


def check_same_operations(first: Recording, second: Recording, where: str) -> None:
    """Refuse a module whose operations depend on its input."""
    pairs = zip(first.operations, second.operations, strict=False)
    for one, other in pairs:
        if one.signature != other.signature:
            raise UnsupportedModel(
                f"{where}: the operation in {one.place or 'its forward'} is {one.name} for one"
                f" input and {other.name} for another: control flow that depends on the data has"
                " no table; replace it by torch.where"
            )
    if len(first.operations) != len(second.operations):
        raise UnsupportedModel(
            f"{where}: {len(first.operations)} operations for one input, {len(second.operations)}"
            " for another: control flow that depends on the data has no table"
        )
