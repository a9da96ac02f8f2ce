"""Distillation data: shuffled batches, with targets from the parents (or the labels)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symmerge.checkpoints.memory import free_memory
from symmerge.errors import DataError
from symmerge.evaluation.data.self_generated import first_logits
from symmerge.evaluation.tasks.base import IGNORED, Batch, LazyBatches, Task
from symmerge.evaluation.tasks.catalog import OWN
from symmerge.matching.learning.targets import Target, joint_answer
from symmerge.matching.optimization.precision import bfloat16_autocast
from symmerge.observation.probe import Inputs

# Targets are cached in a quarter of the free memory: recomputing takes two forward passes.
CACHE_FRACTION, MAX_CACHE = 4, 24 << 30
ROWS = {"image": 64, "text": 32, OWN: 32}  # samples per batch
TOKENS = 3072  # tokens per batch of running text


Loss = Callable[[nn.Module, Batch], Tensor]
"""The loss of a module on a batch with labels."""


def without_cache(module: nn.Module) -> dict[str, bool]:
    """No cache of keys and values: nobody reads it, and some of them make a GPU wait."""
    return {"use_cache": False} if "use_cache" in signature(module.forward).parameters else {}


def loss_of_class(module: nn.Module, batch: Batch) -> Tensor:
    """The loss that a stock class computes from labels."""
    loss = module(**batch, **without_cache(module)).loss
    if loss is None:
        raise DataError(
            f"{type(module).__name__} needs more than these labels for a loss:"
            " learn from the parents instead, --target parents"
        )
    return loss


@final
@dataclass(frozen=True)
class DistillationBatch:
    """One batch on the device: inputs, the positions that count, and their targets.

    Without positions, all count. Without targets, `loss` reads the labels among the inputs.
    """

    inputs: dict[str, Tensor]
    positions: Tensor | None = None
    weights: Tensor | None = None  # of the positions
    targets: Tensor | None = None
    loss: Loss = loss_of_class

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, for CUDA graphs."""
        others = {"/positions": self.positions, "/weights": self.weights, "/targets": self.targets}
        return self.inputs | {name: value for name, value in others.items() if value is not None}

    def clone(self) -> DistillationBatch:
        inputs = {name: value.clone() for name, value in self.inputs.items()}
        others = (self.positions, self.weights, self.targets)
        copies = (None if x is None else x.clone() for x in others)
        return DistillationBatch(inputs, *copies, loss=self.loss)


def usual_batch_size(task: Task) -> int:
    """Default batch size: stable gradients, but small enough for a small machine."""
    return ROWS.get(task.name) or max(1, TOKENS // int(task.settings["block"]))


def split_batches(
    task: Task, size: int, seed: int, held_out: float
) -> tuple[LazyBatches, LazyBatches]:
    """Batches to learn from and to evaluate on, shuffled because tasks sort their samples."""
    batches = task.batches
    assert isinstance(batches, LazyBatches)
    samples = [sample for chunk in batches.chunks for sample in chunk]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    held = max(1, round(held_out * len(samples)))
    if len(samples) - held < 1:
        raise DataError(
            f"{len(samples)} samples of {task.data} are too few to learn from and to evaluate on:"
            " give --samples 2 or more"
        )

    def cut(numbers: list[int]) -> LazyBatches:
        # Full batches only: a smaller last one would need a CUDA graph of its own.
        end = len(numbers) - len(numbers) % size or len(numbers)
        rows = [numbers[start : start + size] for start in range(0, end, size)]
        chunks = tuple(tuple(samples[number] for number in row) for row in rows)
        return LazyBatches(chunks, batches.collate)

    return cut(order[held:]), cut(order[:held])


@final
@dataclass
class DistillationData:
    """Batches with their targets. Targets are computed once, as far as memory allows."""

    batches: LazyBatches
    parents: Sequence[nn.Module]
    target: Target
    device: torch.device
    causal: bool = False  # whether labels are predicted one place earlier
    loss: Loss = loss_of_class  # of labels
    cache_left: int = field(default=0, init=False)  # bytes
    _cache: dict[int, DistillationBatch] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.cache_left = min(free_memory(self.device) // CACHE_FRACTION, MAX_CACHE)
        self._positions = self._max_positions() if self.raw(0)["labels"].ndim == 2 else 0

    def raw(self, number: int) -> Batch:
        """A batch without targets."""
        return self.batches.collate(self.batches.chunks[number])

    def _max_positions(self) -> int:
        """Positions per batch: the same for all, so that shapes agree; padding weighs nothing."""
        return max(int((batch["labels"] != IGNORED).sum()) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> DistillationBatch:
        if number in self._cache:
            return self._cache[number]
        batch = self.answer(self.raw(number))
        tensors = [*batch.inputs.values(), *([] if batch.targets is None else [batch.targets])]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size <= self.cache_left:
            self._cache[number] = batch
            self.cache_left -= size
        return batch

    def answer(self, batch: Batch) -> DistillationBatch:
        """The batch on the device, with the parents' predictions as targets."""
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        if self.target == "labels":
            return DistillationBatch(batch, loss=self.loss)
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        positions, weights = self._weighted_positions(batch["labels"])
        with torch.no_grad(), bfloat16_autocast(self.device):
            logits = [logits_at(module, inputs, positions) for module in self.parents]
            targets = joint_answer(logits, self.target, batch["labels"], causal=self.causal)
        stored = torch.float16 if targets.shape[-1] > 1 else torch.float32
        return DistillationBatch(inputs, positions, weights, targets.to(stored))

    def _weighted_positions(self, labels: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The labelled positions, padded, and their weights; None where all count."""
        counts = labels != IGNORED
        if labels.ndim != 2 or bool(counts.all()):
            return None, None
        places = counts.flatten().nonzero().squeeze(-1)
        weights = torch.zeros(self._positions, device=self.device)
        weights[: len(places)] = 1 / max(1, len(places))  # a batch may have no labels at all
        return F.pad(places, (0, self._positions - len(places))), weights


def logits_at(module: nn.Module, inputs: Inputs, positions: Tensor | None) -> Tensor:
    """The logits at these positions of all samples, or at all positions."""
    logits = first_logits(module(**inputs, **without_cache(module))).flatten(0, -2)
    return (logits if positions is None else logits[positions]).float()


def distillation_loss(module: nn.Module, batch: DistillationBatch) -> Tensor:
    """Cross-entropy to the targets, squared error of a regression, or the loss of labels."""
    with bfloat16_autocast(next(module.parameters()).device):
        if batch.targets is None:
            return batch.loss(module, batch.inputs).float()
        logits = logits_at(module, batch.inputs, batch.positions)
    targets = batch.targets.float()
    if targets.shape[-1] > 1:
        losses = -(targets * logits.log_softmax(-1)).sum(-1)
    else:
        losses = (logits - targets).square().squeeze(-1)
    return losses.mean() if batch.weights is None else (losses * batch.weights).sum()
