"""A task: batches of model inputs with labels, and a readout that turns outputs into metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from symmerge.errors import DataError
from symmerge.evaluation.results import TaskRecord

# Keyword arguments of a stock model, with `labels`: module(**batch).loss is a training loss.
Batch = Mapping[str, Tensor]
Columns = Mapping[str, np.ndarray]  # column -> one float64 per sample

IGNORED = -100  # transformers' label for tokens without a loss
UNLABELLED = (
    "synthetic images (data self) have no labels, so there is no loss to measure or to learn:"
    " give labelled data, or --target parents to learn"
)


class Readout(ABC):
    """How a model's outputs become metrics. The first metric is the loss.

    `without_loss` is the error where there is none to compute.
    """

    without_loss: ClassVar[str] = UNLABELLED

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics, in display order."""

    @property
    def training_loss(self) -> Callable[[nn.Module, Batch], Tensor] | None:
        """A loss of the user's own to learn by; None: the parents' answers, or the class's loss."""
        return None

    @abstractmethod
    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        """The model's prediction: log-probabilities, or values."""

    @abstractmethod
    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        """The joint prediction of several models: mean probabilities, or mean values."""

    @abstractmethod
    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        """The contributions of each sample to the metrics, by column."""

    @abstractmethod
    def summary(self, columns: Columns) -> dict[str, float]:
        """Every metric over all samples; their order does not matter."""


@runtime_checkable
class Batches(Protocol):
    """Batches that can be counted and iterated over repeatedly: a list, or something lazy."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...


@final
@dataclass(frozen=True)
class LazyBatches:
    """Chunks of samples, collated one at a time: images are not all held in memory."""

    chunks: tuple[tuple[object, ...], ...]
    collate: Callable[[Sequence[Any]], Batch]

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.collate, self.chunks)

    @property
    def samples(self) -> list[object]:
        """All samples, in the order of the batches."""
        return [sample for chunk in self.chunks for sample in chunk]

    def of(self, samples: Sequence[object]) -> LazyBatches:
        """The same kind of batches of other samples."""
        size = max(len(chunk) for chunk in self.chunks)
        return replace(self, chunks=_chunks(samples, size))


def _chunks(samples: Sequence[object], size: int) -> tuple[tuple[object, ...], ...]:
    return tuple(tuple(samples[start : start + size]) for start in range(0, len(samples), size))


def batched(
    samples: Iterable[object],
    size: int,
    *,
    key: Callable[[Any], Any],
    collate: Callable[[Sequence[Any]], Batch],
) -> LazyBatches:
    """Batches of samples sorted by `key`, so that the input order does not matter."""
    return LazyBatches(_chunks(sorted(samples, key=key), size), collate)


@final
@dataclass(frozen=True, repr=False)
class Task:
    """Samples in batches, and how to turn a model's outputs on them into metrics.

    `settings` is what else is needed to reproduce it.
    """

    name: str
    data: str
    samples: int
    seed: int
    readout: Readout
    batches: Batches
    settings: Mapping[str, Any]

    def __repr__(self) -> str:
        metrics = ", ".join(self.metrics) or "no loss"
        return f"<Task {self.name} on {self.data}: {self.samples} samples, {metrics}>"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of its metrics; the first is the loss."""
        return self.readout.metrics

    def check_labels(self) -> None:
        """Refuse inputs without labels before a loss is computed."""
        if not self.metrics:
            raise DataError(self.readout.without_loss)

    @torch.no_grad()
    def losses(self, module: nn.Module, batch: Batch) -> Columns:
        """Per-sample columns of one batch; `summary` turns those of all batches into metrics."""
        return self.readout.score(self.readout.predict(module, batch), batch)

    def summary(self, columns: Iterable[Columns]) -> dict[str, float]:
        """Every metric, from the columns of all batches."""
        batches = list(columns)
        names = batches[0]
        return self.readout.summary(
            {name: np.concatenate([batch[name] for batch in batches]) for name in names}
        )

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Every metric of one model."""
        return self.summary(self.losses(module, batch) for batch in self.batches)

    def to_record(self) -> TaskRecord:
        """For result files."""
        return TaskRecord(
            name=self.name,
            data=self.data,
            samples=self.samples,
            seed=self.seed,
            metrics=tuple(self.metrics),
            settings=self.settings,
        )

    def with_samples(self, samples: Sequence[object]) -> Task:
        """The same task on the given samples."""
        assert isinstance(self.batches, LazyBatches)
        return replace(self, samples=len(samples), batches=self.batches.of(samples))


def subsample(task: Task, max_samples: int) -> Task:
    """At most `max_samples` of a task's samples, evenly spaced in the order of its batches."""
    assert isinstance(task.batches, LazyBatches)
    samples = task.batches.samples
    if len(samples) <= max_samples:
        return task
    return task.with_samples(
        [samples[number * len(samples) // max_samples] for number in range(max_samples)]
    )


def split(task: Task, share: float) -> tuple[Task, Task]:
    """Split a task in two: the rest, and a held-out share of evenly spaced samples."""
    assert isinstance(task.batches, LazyBatches)
    samples, step = task.batches.samples, round(1 / share)
    if len(samples) < step or step < 2:
        raise DataError(
            f"{len(samples)} samples of {task.data} cannot be split with a share of {share:g}"
            " held out: give more samples or a smaller share"
        )
    rest = [sample for number, sample in enumerate(samples) if number % step]
    return task.with_samples(rest), task.with_samples(samples[::step])
