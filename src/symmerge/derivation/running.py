"""Run a user's module with the weights of a model, in float64, and compare what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from symmerge.checkpoints.provenance import Verdict
from symmerge.derivation.recording import Outputs, arguments, call, reason_of, running, tensors_of
from symmerge.errors import DataError, UnsupportedModel
from symmerge.models.model import Model

EXACT = 1e-10  # of the outputs, in float64
FEATURES = ("last_hidden_state", "pooler_output")
Inputs = Mapping[str, Any]


def outputs_of(result: Any) -> list[Tensor]:
    """What a module answers: its logits if it names any, else features, else all floats."""
    if isinstance(result, Mapping):
        named = [value for key, value in result.items() if "logits" in str(key)]
        named = named or [result[key] for key in FEATURES if result.get(key) is not None]
        result = named or result
    flat, _ = tree_flatten(result)
    return [one for one in flat if isinstance(one, Tensor) and one.is_floating_point()]


@torch.no_grad()
def perturb_parameters(module: nn.Module, seed: int) -> None:
    """Add noise to all trained parameters, so that no gain is one and no bias zero by chance.

    A table must hold for all weights: what only holds where training begins is no symmetry.
    """
    generator = torch.Generator().manual_seed(seed)
    for one in module.parameters():
        if one.requires_grad and one.is_floating_point():
            scale = 0.2 if one.ndim < 2 else max(1, one[:1].numel()) ** -0.5
            one.add_(scale * torch.randn(one.shape, generator=generator, dtype=torch.float64))


@dataclass(frozen=True)
class Runner:
    """A module, example inputs, how to read its answer, and which buffers training changes."""

    module: nn.Module
    inputs: tuple[Inputs, ...]
    read: Outputs = outputs_of
    state: frozenset[str] = frozenset()

    def outputs(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The answers to all inputs, with these parameters."""
        with running():
            return [
                one.double()
                for inputs in self.inputs
                for one in self.read(call(self.module, tensors, inputs))
            ]

    def outputs_of_model(self, model: Model) -> list[Tensor]:
        """The answers with a model's weights."""
        return self.outputs(parameters_of(self.module, model))

    def module_of(self, model: Model, dtype: torch.dtype) -> nn.Module:
        """A copy of the module that shares the memory of a model's weights."""
        made = copy.deepcopy(self.module)
        with torch.no_grad():
            for name, one in tensors_of(made).items():
                if name in model.weights:
                    value = model.weights[name].to(dtype)
                    _put(
                        made, name, nn.Parameter(value) if isinstance(one, nn.Parameter) else value
                    )
            tensors = tensors_of(made)
            for alias, target in model.spec.ties.items():
                _put(made, alias, tensors[target])
        return made.to(dtype)

    def runnable(self, model: Model, dtype: torch.dtype) -> nn.Module:
        """The same, called as a stock class: arguments by name, and logits by name."""
        return self.as_stock(self.module_of(model, dtype))

    def as_stock(self, module: nn.Module) -> nn.Module:
        """Let a module take the arguments that a batch names, and name its answer."""
        dtype = next(one.dtype for one in module.parameters() if one.is_floating_point())
        module.requires_grad_(False)
        module.forward = partial(_named_answer, module.forward, self.read, dtype)
        return module

    def compare(self, a: Model, b: Model) -> Verdict:
        """Whether two models of this module compute the same function."""
        first, second = self.outputs_of_model(a), self.outputs_of_model(b)
        change = difference(first, second)
        coarse = max(torch.finfo(model.dtype).eps for model in (a, b))
        tolerance = max(EXACT, 1e3 * coarse)
        return Verdict(
            same=change <= tolerance,
            difference=change,
            largest=max((x - y).abs().amax().item() for x, y in zip(first, second, strict=True)),
            rounding=coarse,
            units=change / tolerance,
            tolerance=tolerance,
            where="the outputs for the example inputs",
            settings=(),
            dtype="float64",
            inputs=f"{len(self.inputs)} example inputs",
        )


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(module.get_submodule(owner), key, value)


def _named_answer(
    forward: Callable[..., Any], read: Outputs, dtype: torch.dtype, **inputs: Tensor
) -> dict[str, Tensor]:
    """Call a user's forward, which may do anything; its first answer is called logits."""
    cast = {name: one.to(dtype) if one.is_floating_point() else one for name, one in inputs.items()}
    positional, named = arguments(cast)
    try:
        return {"logits": read(forward(*positional, **named))[0]}
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # torch and user code raise every kind
        shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in inputs.items())
        raise DataError(
            f"your module cannot run the inputs {shapes} ({reason_of(error)}): give inputs like the"
            " example inputs of derive; batches of (inputs, targets) need loss="
        ) from error


def parameters_of(module: nn.Module, model: Model) -> dict[str, Tensor]:
    """A model's weights by the names of a module's parameters; tied names share theirs."""
    tensors = {}
    for name, own in tensors_of(module).items():
        stored = model.spec.ties.get(name, name)
        if stored not in model.weights and not isinstance(own, nn.Parameter):
            continue  # a buffer that is no part of the table
        tensor = model.weights[stored] if stored in model.weights else own.detach()
        tensors[name] = tensor.double() if tensor.is_floating_point() else tensor
    return tensors


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest relative difference of an answer; infinite if one is not a number."""
    changes = [
        ((x - y).norm() / y.norm().clamp_min(1e-30)).item() for x, y in zip(a, b, strict=True)
    ]
    return max((change if change == change else float("inf") for change in changes), default=0.0)


def check_repeatable(runner: Runner, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a module whose answers are no numbers, or not the same twice."""
    name = type(runner.module).__name__
    first, second = runner.outputs(tensors), runner.outputs(tensors)
    if not all(one.isfinite().all() for one in first):
        raise UnsupportedModel(
            f"{name}: its outputs are not finite for the example inputs: give others, or let read="
            " pick outputs without infinities"
        )
    if (change := difference(first, second)) > EXACT:
        raise UnsupportedModel(
            f"{name}: the same inputs give other outputs the second time (by {change:.0e}): draw"
            " random numbers outside of the module, and keep no state between calls"
        )


def used_unseen(runner: Runner, tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """Those of these parameters that change the outputs all the same."""
    source = runner.outputs(tensors)

    def changes(*chosen: str) -> bool:
        noisy = {name: tensors[name] + torch.ones_like(tensors[name]) for name in chosen}
        return difference(runner.outputs({**tensors, **noisy}), source) > EXACT

    names = list(names)
    return [name for name in names if changes(name)] if names and changes(*names) else []


def named_inputs(inputs: Any) -> dict[str, Any]:
    """Example inputs by name; those by position are named by their number."""
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    else:
        listed = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        given = {str(at): one for at, one in enumerate(listed)}
    if not any(isinstance(one, Tensor) for one in tree_flatten(given)[0]):
        raise UnsupportedModel(
            "the example inputs hold no tensor: give what the module's forward takes,"
            " as a tensor, a tuple, or a dictionary of its arguments"
        )
    return {name: tree_map(_in_double, one) for name, one in given.items()}


def _in_double(one: Any) -> Any:
    return one.double() if isinstance(one, Tensor) and one.is_floating_point() else one


def other_inputs(inputs: Inputs, seed: int) -> dict[str, Any]:
    """Inputs of the same kind with other values: numbers as noise, tokens in another order."""
    generator = torch.Generator().manual_seed(seed)

    def other(one: Any) -> Any:
        if not isinstance(one, Tensor) or one.dtype == torch.bool or not one.numel():
            return one
        if one.is_floating_point():
            noise = torch.randn(one.shape, generator=generator, dtype=torch.float64)
            return noise * one.std(correction=0).clamp_min(0.1) + one.mean()
        if len(one.unique()) < 3:  # a mask or a type
            return one
        # rows keep their tokens: some classes count the ends in each
        rows = one.reshape(-1, one.shape[-1] if one.ndim else 1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        order = torch.rand(rows.shape, generator=generator).argsort(-1)
        return rows.gather(-1, order).reshape(one.shape)

    return {name: tree_map(other, one) for name, one in inputs.items()}


Read = Callable[[Any], list[Tensor]]
