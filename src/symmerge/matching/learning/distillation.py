"""What learned matching learns from: inputs in shuffled batches, and what their parents (or the labels) say about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symmerge.errors import DataError
from symmerge.evaluation.data.self_generated import first_logits
from symmerge.evaluation.tasks.base import IGNORED, Batch, LazyBatches, Task
from symmerge.observation.probe import Inputs

Target = Literal["parents", "labels"]
KEPT_PART, MOST_KEPT = (
    4,
    24 << 30,
)  # of what the parents said: a fourth of the memory that is free, for asking them again costs two forward passes
UNTOLD = 8 << 30
ROWS = {"image": 64, "text": 32}  # samples of a batch
TOKENS = 3072  # of a batch of text without padding


class Lesson(NamedTuple):
    """One batch on the device: what a model takes, the places that count (all, if none are named) with their weights, and the answers wanted there."""

    inputs: dict[str, Tensor]
    places: Tensor | None
    weights: Tensor | None
    wanted: Tensor | None


def usual_batch_size(task: Task) -> int:
    """A size at which the gradient is calm enough and a small machine still fast."""
    return ROWS.get(task.name) or max(1, TOKENS // int(task.settings["block"]))


def shuffled(task: Task, size: int, seed: int, held_out: float) -> tuple[LazyBatches, LazyBatches]:
    """Batches to learn from, and batches to judge by: tasks keep their samples sorted, which is no order to learn in."""
    assert isinstance(task.batches, LazyBatches)
    samples = [sample for group in task.batches.chunks for sample in group]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    held = max(1, round(held_out * len(samples)))
    if len(samples) - held < 1:
        raise DataError(
            f"{len(samples)} samples of {task.data} are too few to learn from and to judge by: give --samples 2 or more"
        )

    def cut(part: list[int]) -> LazyBatches:
        whole = len(part) - len(part) % size or len(
            part
        )  # a smaller last batch would be recorded anew on a GPU
        groups = tuple(
            tuple(samples[at] for at in part[start : start + size])
            for start in range(0, whole, size)
        )
        return LazyBatches(groups, task.batches.collate)  # type: ignore[union-attr]

    return cut(order[held:]), cut(order[:held])


@final
@dataclass
class Lessons:
    """Batches with their answers, asked of the parents once and kept as far as memory goes."""

    batches: LazyBatches
    parents: Sequence[nn.Module]
    target: Target
    device: torch.device
    left: int = 0

    def __post_init__(self) -> None:
        self._kept: dict[int, Lesson] = {}
        self.left = min(_free(self.device) // KEPT_PART, MOST_KEPT)
        self._places = self._most_places() if self._batch(0)["labels"].ndim == 2 else 0

    def _batch(self, number: int) -> Batch:
        return self.batches.collate(self.batches.chunks[number])

    def _most_places(self) -> int:
        """As many places in every batch, so that all have one shape; what fills up weighs nothing."""
        return max(int((batch["labels"] != IGNORED).sum()) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Lesson:
        if number not in self._kept:
            made = self._made(self._batch(number))
            size = sum(
                tensor.numel() * tensor.element_size()
                for tensor in (*made.inputs.values(), made.wanted)
                if tensor is not None
            )
            if size > self.left:
                return made
            self._kept[number] = made
            self.left -= size
        return self._kept[number]

    def _made(self, batch: Batch) -> Lesson:
        given = {name: tensor.to(self.device) for name, tensor in batch.items()}
        labels = given["labels"]
        if self.target == "labels":
            return Lesson(given, None, None, None)
        inputs = {name: tensor for name, tensor in given.items() if name != "labels"}
        places = weights = None
        if labels.ndim == 2 and not bool((labels != IGNORED).all()):
            where = (labels != IGNORED).flatten().nonzero().squeeze(-1)
            places, weights = (
                F.pad(where, (0, self._places - len(where))),
                torch.zeros(self._places, device=self.device),
            )
            weights[: len(where)] = 1 / max(1, len(where))  # a batch may have no blank at all
        with torch.no_grad(), lean(self.device):
            answers = torch.stack(
                [_answers(at_places(module, inputs, places)) for module in self.parents]
            ).mean(0)
        return Lesson(
            inputs,
            places,
            weights,
            answers.to(torch.float16 if answers.shape[-1] > 1 else torch.float32),
        )


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    told = "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {})  # not every system says
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if told else UNTOLD


def lean(device: torch.device):
    """Mixed precision where the hardware gains by it. Not on a CPU: products in bfloat16 kill Python on some."""
    return torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")


def at_places(module: nn.Module, inputs: Inputs, places: Tensor | None) -> Tensor:
    found = first_logits(module(**inputs))
    found = found.flatten(0, -2)
    return (found if places is None else found[places]).float()


def _answers(logits: Tensor) -> Tensor:
    """Probabilities, or the value where there is only one."""
    return logits.softmax(-1) if logits.shape[-1] > 1 else logits


def loss_of(module: nn.Module, lesson: Lesson) -> Tensor:
    """The cross-entropy to the answers wanted (their squared error where they are values), or the model's own loss where they are labels."""
    with lean(next(module.parameters()).device):
        if lesson.wanted is None:
            loss = module(**lesson.inputs).loss
            if loss is None:
                raise DataError(
                    f"{type(module).__name__} needs more than these labels for a loss: learn what the parents say, --target parents"
                )
            return loss.float()
        logits = at_places(module, lesson.inputs, lesson.places)
    wanted = lesson.wanted.float()
    each = (
        -(wanted * logits.log_softmax(-1)).sum(-1)
        if wanted.shape[-1] > 1
        else (logits - wanted).square().squeeze(-1)
    )
    return each.mean() if lesson.weights is None else (each * lesson.weights).sum()
