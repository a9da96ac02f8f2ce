"""The data of a run: batches to learn from, and held-out batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from symmerge.distributed import local_device
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks.base import IGNORED, UNLABELLED, LazyBatches, Task
from symmerge.evaluation.tasks.catalog import OWN, SELF_LABELLED, SELF_SOURCES, make_task, task_of
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.evaluation.tasks.readouts import TokenReadout
from symmerge.matching.learning.distillation import (
    DistillationBatch,
    DistillationData,
    logits_at,
    loss_of_class,
    split_batches,
    usual_batch_size,
)
from symmerge.matching.learning.mixing import mixed
from symmerge.matching.learning.options import DataOptions
from symmerge.matching.learning.targets import (
    BY_TEXT,
    DISAGREE,
    Target,
    disagreement,
    log_likelihoods,
    row_likelihoods,
)
from symmerge.models.model import (
    Model,
    device_of,
)
from symmerge.models.progress import Phase, Progress
from symmerge.verification.modules import full_module

# to learn from, at most
SAMPLES = {"clm": 2000, "seq2seq": 2000, "mlm": 4000, "image": 10_000, "text": 10_000}
SELF_SAMPLES = {"clm": 512, "seq2seq": 512, "mlm": 1024, "image": 4000}  # of self-generated inputs
EVALUATION_BATCHES = 8
NO_INPUTS = {"text": "a classifier of texts", OWN: "a module of your own"}  # where none are made


def max_inputs(kind: str, data: str) -> int | None:
    """Default limit on the inputs to learn from, by kind of task."""
    return (SELF_SAMPLES if data == "self" else SAMPLES).get(kind)


@final
@dataclass(frozen=True)
class LearningData:
    """Batches to learn from, and batches to evaluate on; `train.target` is what was chosen."""

    train: DistillationData
    held_out: DistillationData

    def evaluation_batches(self) -> list[DistillationBatch]:
        count = min(EVALUATION_BATCHES, len(self.held_out))
        return [self.held_out[number] for number in range(count)]


def check_data(options: DataOptions, model: Model) -> None:
    """Refuse models that cannot generate inputs if no data is given."""
    kind = task_of(model)
    if options.data is None and kind not in SELF_SOURCES:
        raise MismatchError(
            f"{model.where} has no inputs without data (it is {NO_INPUTS[kind]}):"
            " give data to learn from"
        )
    if options.target in BY_TEXT and kind not in SELF_LABELLED:
        raise MismatchError(
            f"target {options.target}: only text shows which parent knows it, and"
            f" {model.where} is for {model.spec.task}; use parents"
        )
    if options.data is None and options.target == "labels" and kind not in SELF_LABELLED:
        raise DataError(UNLABELLED)


def load_data(options: DataOptions, models: Sequence[Model], progress: Progress) -> LearningData:
    """The data of a run; self-generated if none is given."""
    device = device_of(local_device(options.device))
    task = options.data or _self_generated(options, models, progress, str(device))
    check_same_tokenizers(models)
    size = options.batch_size or usual_batch_size(task)
    splits = split_batches(task, size, options.seed, options.held_out)
    if task.name == "image" and options.mixed and options.target != "labels":
        splits = mixed(splits[0], size, options.seed), mixed(splits[1], size, options.seed)
    # What a user's module answers may be no logits, and only the user's loss knows.
    own_loss = options.target == "auto" and task.readout.training_loss
    target, parents = "labels" if own_loss else options.target, []
    if target != "labels":
        parents = [full_module(model, torch.float32, device) for model in models]
    causal = isinstance(task.readout, TokenReadout) and task.readout.causal
    if target == "auto":
        target = _target(parents, splits[1], device, causal=causal)
    loss = task.readout.training_loss or loss_of_class
    train, held_out = (
        DistillationData(split, parents, target, device, causal=causal, loss=loss)
        for split in splits
    )
    return LearningData(train, held_out)


@torch.no_grad()
def _target(
    parents: Sequence[nn.Module], batches: LazyBatches, device: torch.device, *, causal: bool
) -> Target:
    """The mean of the parents, or of text by whom it is known, if each knows a text of its own."""
    first = batches.collate(batches.chunks[0])
    if "input_ids" not in first or first["labels"].ndim != 2 or len(parents) < 2:
        return "parents"
    rows = []
    for batch in itertools.islice(batches, EVALUATION_BATCHES):
        labels = batch["labels"].to(device)
        inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
        places = None if causal else (labels != IGNORED).flatten().nonzero().squeeze(-1)
        known = [
            log_likelihoods(logits_at(parent, inputs, places), labels, causal=causal)
            for parent in parents
        ]
        rows.append(row_likelihoods(known, labels, causal=causal))
    return "bayes" if disagreement(torch.cat(rows, 1)) > DISAGREE else "parents"


def _self_generated(
    options: DataOptions, models: Sequence[Model], progress: Progress, device: str
) -> Task:
    kind = task_of(models[0])
    progress(Phase(f"generating inputs to learn from: {SELF_SOURCES[kind]}"))
    samples = options.generated or max_inputs(kind, "self")
    how = {"max_samples": samples, "length": options.generated_length, "seed": options.seed}
    how |= {"device": device, "progress": progress}
    return make_task(kind, "self", models, **how)  # type: ignore[arg-type]
