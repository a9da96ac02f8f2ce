"""Weighted means of a few models in one module: no reloading, and one copy of the weights more than there are models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import nn

from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError
from symmerge.evaluation.tasks import Task
from symmerge.evaluation.tasks.base import Batch
from symmerge.models.model import Model, Progress, device_of
from symmerge.models.tables import check_same_table
from symmerge.verification.modules import full_module

Shares = tuple[float, ...]  # one number per model; they sum to one
Numbers = Mapping[str, float]  # metric -> value
AT_ONCE = {"cuda": 8}
"""How many batches a device takes at once: a batch made for a CPU is over on a GPU before the next kernel has been launched."""


@final
class Mixture:
    """Models of one table in memory, in float32, and a module that holds a weighted mean of them."""

    def __init__(self, models: Sequence[Model], *, device: str = "cpu") -> None:
        check_same_table(models, "joined by a line")
        first = models[0]
        self.device = device_of(device)
        self._parts = [
            {
                name: model.weights[name].to(self.device, torch.float32)
                for name in first.spec.tensors
            }
            for model in models
        ]
        self._mean = {name: torch.empty_like(tensor) for name, tensor in self._parts[0].items()}
        # Parameters share the memory of these tensors: changing the mean changes the module.
        self._module = full_module(
            replace(first, weights=MemoryWeights(self._mean)), torch.float32
        ).to(self.device)

    @torch.no_grad()
    def at(self, shares: Shares) -> nn.Module:
        """The module with the weights at this place: the same one every time, so use it before you ask for the next."""
        for name, mean in self._mean.items():
            first, *others = (part[name] for part in self._parts)
            if (
                len(others) == 1
            ):  # a line takes one pass over the weights instead of two, and its ends are exact
                torch.lerp(first, others[0], shares[1], out=mean)
                continue
            torch.mul(first, shares[0], out=mean)
            for weight, other in zip(shares[1:], others, strict=True):
                mean.add_(other, alpha=weight)
        return self._module

    def products(self) -> list[list[float]]:
        """The inner products of the models' differences from the first: how they lie to each other."""
        total = torch.zeros(len(self._parts), len(self._parts), dtype=torch.float64)
        for name, origin in self._parts[0].items():
            apart = torch.stack([(part[name] - origin).flatten() for part in self._parts])
            total += (apart @ apart.T).double().cpu()
        return total.tolist()


@torch.no_grad()
def evaluate(
    mixture: Mixture, task: Task, places: Sequence[Shares], *, progress: Progress | None = None
) -> tuple[list[Numbers], Numbers]:
    """Every metric at every place, and of the ensemble of the models themselves, which must be among the places.

    One pass over the data: batches outside, places inside.
    """
    task.check_labels()
    scores, together = [[] for _ in places], []
    for number, batch in _joined(task.batches, AT_ONCE.get(mixture.device.type, 1)):
        batch = {name: tensor.to(mixture.device) for name, tensor in batch.items()}
        parents = []
        for place, columns in zip(places, scores, strict=True):
            prediction = task.readout.predict(mixture.at(place), batch)
            columns.append(task.readout.score(prediction, batch))
            if sorted(place)[-2:] == [0, 1]:
                parents.append(prediction)
            if progress:
                progress(f"batch {number} of {len(task.batches)}")
        together.append(task.readout.score(task.readout.ensemble(parents), batch))
    found = [
        _finite(task.summary(columns), f"with weights {' and '.join(f'{w:.3g}' for w in place)}")
        for place, columns in zip(places, scores, strict=True)
    ]
    return found, _finite(task.summary(together), "of the ensemble")


def _joined(batches: Iterable[Batch], most: int) -> Iterator[tuple[int, Batch]]:
    """Batches of one shape put together, at most so many, and how many there were so far."""
    held: list[Batch] = []
    number = 0
    for number, batch in enumerate(batches, 1):
        if held and (len(held) == most or _shape(batch) != _shape(held[0])):
            yield number - 1, _together(held)
            held = []
        held.append(batch)
    if held:
        yield number, _together(held)


def _shape(batch: Batch) -> dict[str, torch.Size]:
    return {name: tensor.shape[1:] for name, tensor in batch.items()}


def _together(batches: Sequence[Batch]) -> Batch:
    return (
        batches[0]
        if len(batches) == 1
        else {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    )


def _finite(numbers: Numbers, where: str) -> Numbers:
    wrong = [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]
    if wrong:
        raise MismatchError(
            f"{', '.join(wrong)} {where}: the model overflows there in float32; check that each model gives a loss on its own"
        )
    return numbers
