"""A task of a user's own batches, for modules whose tables were derived."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from symmerge.derivation.recording import reason_of
from symmerge.derivation.running import Runner
from symmerge.errors import DataError
from symmerge.evaluation.tasks.base import IGNORED, Batch, Columns, LazyBatches, Readout, Task
from symmerge.evaluation.tasks.catalog import OWN
from symmerge.symmetry.spec import listing

Loss = Callable[[Tensor, Tensor], Tensor]
"""(answer, targets) -> the mean loss of a batch."""
ROWS = 64  # of a batch that is measured or observed
TARGETS = "labels"  # the name of targets in a batch, as everywhere


@final
@dataclass(frozen=True)
class OwnReadout(Readout):
    """The answer of a user's module, and the user's loss; without one there are answers alone."""

    own_loss: Loss | None
    without_loss = (
        "these inputs have no targets, so there is no loss to measure or to learn: make the task"
        " from pairs, derivation.task([(inputs, targets), ...], loss=...)"
    )

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss",) if self.own_loss else ()

    @property
    def training_loss(self) -> Callable[[nn.Module, Batch], Tensor] | None:
        return self._training_loss if self.own_loss else None

    def _training_loss(self, module: nn.Module, batch: Batch) -> Tensor:
        answer = self.predict(module, batch)
        loss = self._loss(answer, batch[TARGETS])
        if answer.requires_grad and not loss.requires_grad:
            raise DataError(
                "the loss has no gradient, so nothing can be learned from it: give one that is"
                " differentiable, such as cross-entropy, or learn with target='parents'"
            )
        return loss

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != TARGETS}
        return module(**inputs)["logits"]

    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(predictions)).mean(0)

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        targets = batch[TARGETS]
        loss = self._loss(prediction, targets).item()
        return {"loss": np.array([loss * len(targets)]), "rows": np.array([float(len(targets))])}

    def summary(self, columns: Columns) -> dict[str, float]:
        return {"loss": math.fsum(columns["loss"]) / math.fsum(columns["rows"])}

    def _loss(self, answer: Tensor, targets: Tensor) -> Tensor:
        """The user's loss, which may do anything."""
        if self.own_loss is None:
            raise DataError(self.without_loss)
        shapes = f"answers {list(answer.shape)} and targets {list(targets.shape)}"
        try:
            loss = self.own_loss(answer, targets)
        except Exception as error:  # torch and user code raise every kind
            raise DataError(
                f"the loss cannot compare {shapes} ({reason_of(error)}): give a loss that takes"
                " both, as loss(answers, targets)"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"{list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise DataError(
                f"the loss of {shapes} is {what}: give one that returns a single number as a"
                " tensor, the mean over the batch"
            )
        return loss.reshape(())


def own_task(batches: Iterable[Any], loss: Loss | None, name: str) -> Task:
    """A task of batches that a user gives: (inputs, targets), or inputs alone without a loss.

    All are held in memory; samples are the rows of their tensors.
    """
    named = [_named(batch, loss, number) for number, batch in enumerate(batches)]
    if not named:
        raise DataError(
            f"{name}: there are no batches: give a list of (inputs, targets); an iterator that was"
            " read before is empty, make a list of it first"
        )
    _check_alike(named)
    tensors = {name: torch.cat([batch[name] for batch in named]) for name in named[0]}
    rows = len(tensors[TARGETS])
    if not rows:
        raise DataError(f"{name}: the batches have no rows: give some samples")

    def collate(chosen: Sequence[int]) -> Batch:
        return {name: tensor[list(chosen)] for name, tensor in tensors.items()}

    chunks = tuple(tuple(range(start, min(start + ROWS, rows))) for start in range(0, rows, ROWS))
    settings = {"loss": getattr(loss, "__name__", type(loss).__name__)} if loss else {}
    return Task(OWN, name, rows, 0, OwnReadout(loss), LazyBatches(chunks, collate), settings)


@torch.no_grad()
def check_task(task: Task, runner: Runner) -> None:
    """Run a few rows through the module that was derived, and the loss, before any work."""
    module = runner.as_stock(copy.deepcopy(runner.module).float())
    batch = {name: tensor[:2] for name, tensor in next(iter(task.batches)).items()}
    prediction = task.readout.predict(module, batch)
    if task.metrics:
        task.readout.score(prediction, batch)


def _named(batch: Any, loss: Loss | None, number: int) -> dict[str, Tensor]:
    """One batch by the names of its arguments; those by position are named by their number."""
    inputs, targets = batch, None
    if loss is not None:
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise DataError(
                f"batch {number} is not a pair: a loss compares answers with targets, so give"
                " batches of (inputs, targets)"
            )
        inputs, targets = batch
    if not isinstance(inputs, Mapping):
        listed = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        inputs = {str(at): one for at, one in enumerate(listed)}
    if TARGETS in inputs:
        raise DataError(
            f"batch {number} has an argument called {TARGETS}: leave it out; targets are given"
            " separately, as (inputs, targets)"
        )
    tensors = {**inputs} if loss is None else {**inputs, TARGETS: targets}
    if other := [name for name, one in tensors.items() if not isinstance(one, Tensor)]:
        raise DataError(
            f"batch {number}: {listing(other)} is not a tensor: every argument of the module, and"
            " the targets, must be one tensor with a row for each sample"
        )
    return _in_rows(tensors, number)


def _in_rows(tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """The tensors of a batch, if all have as many rows; inputs alone get empty targets."""
    rows = {len(one) if one.ndim else 0 for one in tensors.values()}
    if len(rows) != 1:
        shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in tensors.items())
        raise DataError(
            f"batch {number}: {shapes}: the first axis of each must count the same samples"
        )
    targets = {} if TARGETS in tensors else {TARGETS: torch.full((rows.pop(),), IGNORED)}
    return {name: one.detach().cpu() for name, one in {**tensors, **targets}.items()}


def _check_alike(batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse batches that cannot be mixed: samples are shuffled, and some are held out."""
    first, *others = ({n: tuple(t.shape[1:]) for n, t in batch.items()} for batch in batches)
    for number, other in enumerate(others, 1):
        if other != first:
            changed = [n for n in {**first, **other} if first.get(n) != other.get(n)]
            raise DataError(
                f"batches 0 and {number} differ in {listing(changed)}: samples of all batches are"
                " mixed, so pad them to one shape, with the same arguments"
            )
