"""Means and standard deviations of module outputs, for REPAIR."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symmerge.evaluation.tasks.base import Batch, Task

Hook = Callable[[str, Tensor, Tensor], None]
"""Called with a module's name, input and output."""


@dataclass
class Spread:
    """Sums over tokens of a module's output, in float64."""

    rows: int = 0
    count: float | Tensor = 0.0
    total: float | Tensor = 0.0
    square: float | Tensor = 0.0

    def add(self, values: Float[Tensor, "*tokens n"], weights: Float[Tensor, "*tokens"]) -> None:
        wide, weights = values.double().flatten(0, -2), weights.flatten()
        self.rows += int((weights > 0).sum())
        self.count = self.count + weights.sum()
        self.total = self.total + weights @ wide
        self.square = self.square + weights @ wide.square()

    @property
    def mean(self) -> Float[Tensor, " n"]:
        return torch.as_tensor(self.total / self.count).cpu()

    @property
    def deviation(self) -> Float[Tensor, " n"]:
        """Standard deviation; a variance that is only rounding counts as zero."""
        square = torch.as_tensor(self.square / self.count).cpu()
        variance = square - self.mean.square()
        return torch.where(variance > 1e-10 * square, variance, 0.0).sqrt()


class _AllSeen(Exception):
    """Stops a forward pass once every requested module has run."""


@torch.no_grad()
def measure_spreads(module: nn.Module, names: Sequence[str], task: Task) -> dict[str, Spread]:
    """Output statistics of these modules over all inputs of a task."""
    spreads = {name: Spread() for name in names}
    for batch in batches_for(module, task):
        left = set(names)

        def see(
            name: str, _: Tensor, output: Tensor, batch: Batch = batch, left: set[str] = left
        ) -> None:
            spreads[name].add(output, token_weights(output, batch))
            left.remove(name)
            if not left:
                raise _AllSeen

        with _watching(module, names, see):
            _forward(module, batch)
    return spreads


@torch.no_grad()
def stages(module: nn.Module, names: Sequence[str], task: Task) -> list[list[str]]:
    """Names in the order of the forward pass; modules with the same input tensor in one group."""
    by_input: dict[int, list[str]] = {}
    inputs: list[Tensor] = []  # kept alive, so that ids are not reused

    def see(name: str, tensor: Tensor, _: Tensor) -> None:
        inputs.append(tensor)
        by_input.setdefault(id(tensor), []).append(name)

    with _watching(module, names, see):
        _forward(module, next(batches_for(module, task)))
    return list(by_input.values())


def _forward(module: nn.Module, batch: Batch) -> None:
    module(**{name: tensor for name, tensor in batch.items() if name != "labels"})


@contextmanager
def _watching(module: nn.Module, names: Sequence[str], see: Hook) -> Iterator[None]:
    """Call `see` with the input and output of these modules.

    `activations.watch` covers the stream and the matched spaces, not the output of every map.
    """

    def show(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        see(name, inputs[0], output)

    hooks = [
        module.get_submodule(name).register_forward_hook(partial(show, name)) for name in names
    ]
    try:
        yield
    except _AllSeen:
        pass
    finally:
        for hook in hooks:
            hook.remove()


def token_weights(values: Tensor, batch: Batch) -> Float[Tensor, "*tokens"]:
    """Weights of tokens: padding counts as zero.

    Where a model has one answer per sample, its first token (read by the head) counts as much as
    all others together.
    """
    weights = values.new_ones(values.shape[:-1], dtype=torch.float64)
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == weights.shape:
        weights = weights * mask
    if batch["labels"].ndim == 1 and weights.ndim == 2 and weights.shape[1] > 1:
        weights[:, 0] = weights[:, 1:].sum(1).clamp_min(1)
    return weights


def batches_for(module: nn.Module, task: Task) -> Iterator[Batch]:
    """A task's batches on the module's device."""
    device = next(module.parameters()).device
    return ({name: tensor.to(device) for name, tensor in batch.items()} for batch in task.batches)
