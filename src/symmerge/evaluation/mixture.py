"""Evaluate weighted means of a few models in one module, without reloading.

The weights of every model and of one mean are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import nn

from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError
from symmerge.evaluation.results import Metrics
from symmerge.evaluation.tasks import Task
from symmerge.evaluation.tasks.base import Batch
from symmerge.models.label_sets import with_all_labels
from symmerge.models.model import (
    Model,
    device_of,
)
from symmerge.models.progress import Progress
from symmerge.models.tables import check_same_table
from symmerge.verification.modules import full_module

Shares = tuple[float, ...]  # a weight per model; they sum to one
# Batches joined into one: a single CPU-sized batch is too small to keep a GPU busy.
JOINED_BATCHES = {"cuda": 8}


@final
class Mixture:
    """Models with the same table in float32, and a module that holds a weighted mean of them."""

    def __init__(self, models: Sequence[Model], *, device: str = "cpu") -> None:
        check_same_table(models, "joined by a line")
        models = with_all_labels(models)
        first = models[0]
        self.device = device_of(device)
        self._models = [
            {
                name: model.weights[name].to(self.device, torch.float32)
                for name in first.spec.tensors
            }
            for model in models
        ]
        self._mean = {name: torch.empty_like(tensor) for name, tensor in self._models[0].items()}
        # Parameters share the memory of these tensors: changing the mean changes the module.
        self._module = full_module(
            replace(first, weights=MemoryWeights(self._mean)), torch.float32
        ).to(self.device)

    @torch.no_grad()
    def at(self, shares: Shares) -> nn.Module:
        """The module with this weighted mean. There is only one: the next call overwrites it."""
        for name, mean in self._mean.items():
            first, *others = (weights[name] for weights in self._models)
            if len(others) == 1:  # one pass over the weights instead of two, and exact ends
                torch.lerp(first, others[0], shares[1], out=mean)
                continue
            torch.mul(first, shares[0], out=mean)
            for weight, other in zip(shares[1:], others, strict=True):
                mean.add_(other, alpha=weight)
        return self._module

    def products(self) -> list[list[float]]:
        """Inner products of the models' differences from the first model."""
        total = torch.zeros(len(self._models), len(self._models), dtype=torch.float64)
        for name, origin in self._models[0].items():
            differences = [(weights[name] - origin).flatten() for weights in self._models]
            stacked = torch.stack(differences)
            total += (stacked @ stacked.T).double().cpu()
        return total.tolist()


@torch.no_grad()
def evaluate_mixture(
    mixture: Mixture, task: Task, places: Sequence[Shares], *, progress: Progress | None = None
) -> tuple[list[Metrics], Metrics]:
    """Metrics of every weighted mean, and of the ensemble of the models.

    `places` are weights of the models, and must include each model alone. One pass over the data:
    the outer loop is over batches.
    """
    task.check_labels()
    scores, ensemble_scores = [[] for _ in places], []
    for number, batch in _join(task.batches, JOINED_BATCHES.get(mixture.device.type, 1)):
        batch = {name: tensor.to(mixture.device) for name, tensor in batch.items()}
        parents = []
        for place, place_scores in zip(places, scores, strict=True):
            prediction = task.readout.predict(mixture.at(place), batch)
            place_scores.append(task.readout.score(prediction, batch))
            if sorted(place)[-2:] == [0, 1]:
                parents.append(prediction)
            if progress:
                progress(f"batch {number} of {len(task.batches)}")
        ensemble_scores.append(task.readout.score(task.readout.ensemble(parents), batch))
    metrics = [
        check_finite(task.summary(place_scores), f"with weights {_listed(place)}")
        for place, place_scores in zip(places, scores, strict=True)
    ]
    return metrics, check_finite(task.summary(ensemble_scores), "of the ensemble")


def _join(batches: Iterable[Batch], at_most: int) -> Iterator[tuple[int, Batch]]:
    """Join consecutive batches of one shape; yields them with the number of batches so far."""
    group: list[Batch] = []
    number = 0
    for number, batch in enumerate(batches, 1):
        if group and (len(group) == at_most or _shape(batch) != _shape(group[0])):
            yield number - 1, _concatenate(group)
            group = []
        group.append(batch)
    if group:
        yield number, _concatenate(group)


def _shape(batch: Batch) -> dict[str, torch.Size]:
    return {name: tensor.shape[1:] for name, tensor in batch.items()}


def _concatenate(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _listed(place: Shares) -> str:
    return " and ".join(f"{weight:.3g}" for weight in place)


def check_finite(metrics: Metrics, where: str) -> Metrics:
    """Refuse metrics that are infinite or NaN."""
    wrong = [f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise MismatchError(
            f"{', '.join(wrong)} {where}: the model overflows there in float32;"
            " check that each model gives a loss on its own"
        )
    return metrics
