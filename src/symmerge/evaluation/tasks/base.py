"""What a task is: batches of model inputs with labels, and a readout that turns a model's answers into numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from symmerge.errors import DataError

Batch = Mapping[
    str, Tensor
]  # what a stock model takes, `labels` included: module(**batch).loss is a loss to train on
Columns = Mapping[str, np.ndarray]  # one number per sample and column, in float64

IGNORED = -100  # the label transformers gives tokens that do not count
UNLABELLED = "pictures that were drawn (data self) have no labels, so there is no loss to measure or to learn: give data with labels, or --target parents to learn"


class Readout(ABC):
    """How a model's answers become numbers. The first metric is the loss."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of the numbers, in the order they are shown."""

    @abstractmethod
    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        """What counts of the model's answer: logarithms of probabilities, or values."""

    @abstractmethod
    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        """The prediction several models make together: the mean of their probabilities, or of their values."""

    @abstractmethod
    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        """Numbers for each sample."""

    @abstractmethod
    def summary(self, columns: Columns) -> dict[str, float]:
        """Every metric over all samples, whatever order they came in."""


@runtime_checkable
class Batches(Protocol):
    """What can be counted and gone through as often as one likes: a list of batches, or something lazy."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...


@final
@dataclass(frozen=True)
class LazyBatches:
    """Groups of samples that become batches one at a time: images are not held in memory."""

    chunks: tuple[tuple[Any, ...], ...]
    collate: Callable[[Sequence[Any]], Batch]

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.collate, self.chunks)


def batched(
    samples: Iterable[Any],
    size: int,
    *,
    key: Callable[[Any], Any],
    collate: Callable[[Sequence[Any]], Batch],
) -> LazyBatches:
    """Samples in groups, in the order of `key`: the same batches whatever order the samples came in."""
    ordered = sorted(samples, key=key)
    return LazyBatches(
        tuple(tuple(ordered[at : at + size]) for at in range(0, len(ordered), size)), collate
    )


@final
@dataclass(frozen=True)
class Task:
    """Samples in batches and what to make of a model's answers to them. `settings` is what else a reader needs to repeat it."""

    name: str
    data: str
    samples: int
    seed: int
    readout: Readout
    batches: Batches
    settings: Mapping[str, Any]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the numbers it gives; the first is the loss."""
        return self.readout.metrics

    def check_labels(self) -> None:
        """Refuse inputs without labels, where a loss is wanted: before anything is computed."""
        if not self.metrics:
            raise DataError(UNLABELLED)

    @torch.no_grad()
    def losses(self, module: nn.Module, batch: Batch) -> Columns:
        """One batch's numbers, sample by sample; `summary` makes metrics of all of them."""
        return self.readout.score(self.readout.predict(module, batch), batch)

    def summary(self, columns: Iterable[Columns]) -> dict[str, float]:
        """Every metric, from the numbers of all batches."""
        found = list(columns)
        return self.readout.summary(
            {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        )

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Every metric of one model."""
        return self.summary(self.losses(module, batch) for batch in self.batches)

    def record(self) -> dict[str, Any]:
        """For the results."""
        return {
            "name": self.name,
            "data": self.data,
            "samples": self.samples,
            "seed": self.seed,
            "metrics": list(self.metrics),
            **self.settings,
        }


def subsample(task: Task, most: int) -> Task:
    """A few samples of a task, evenly from the order they are batched in; all, if there are no more."""
    assert isinstance(task.batches, LazyBatches)
    samples = [sample for group in task.batches.chunks for sample in group]
    if len(samples) <= most:
        return task
    picked = [samples[at * len(samples) // most] for at in range(most)]
    size = max(len(group) for group in task.batches.chunks)
    return replace(
        task,
        samples=most,
        batches=LazyBatches(
            tuple(tuple(picked[at : at + size]) for at in range(0, most, size)),
            task.batches.collate,
        ),
    )


def split(task: Task, share: float) -> tuple[Task, Task]:
    """A task in two: most of its samples, and a share of them held out, evenly from the order they are batched in."""
    assert isinstance(task.batches, LazyBatches)
    samples = [sample for group in task.batches.chunks for sample in group]
    step = round(1 / share)
    if len(samples) < step or step < 2:
        raise DataError(
            f"{len(samples)} samples of {task.data} cannot be split with a share of {share:g} held out: give more samples or a smaller share"
        )
    size = max(len(group) for group in task.batches.chunks)
    parts = [sample for at, sample in enumerate(samples) if at % step], samples[::step]
    first, second = (
        replace(
            task,
            samples=len(part),
            batches=LazyBatches(
                tuple(tuple(part[at : at + size]) for at in range(0, len(part), size)),
                task.batches.collate,
            ),
        )
        for part in parts
    )
    return first, second
