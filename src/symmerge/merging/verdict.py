"""Is a merge any good? Its loss beside its parents', their plain average's and their ensemble's.

On data if there is any, else on text that the parents sample, or on synthetic images, where their
ensemble gives the answers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from symmerge.aligning.aligned import Aligned
from symmerge.aligning.folders import AlignedFolder
from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.aligning.many import AlignedMany
from symmerge.checkpoints.card import public_name
from symmerge.checkpoints.memory import free_memory
from symmerge.errors import MismatchError, SymmergeError, SymmergeWarning
from symmerge.evaluation.results import LinePoint, Metrics
from symmerge.evaluation.tasks import SELF_SOURCES, Task, make_task, task_of
from symmerge.evaluation.tasks.base import Batch
from symmerge.evaluation.tasks.catalog import TASKS
from symmerge.merging.combining import normalised_weights
from symmerge.merging.verdict_results import (
    AVERAGE,
    ENSEMBLE,
    MERGE,
    PARENT,
    MergeVerdict,
    VerdictRow,
)
from symmerge.merging.verdict_words import UNLABELLED_METRICS, conclude
from symmerge.models.interpolation import interpolate, mean
from symmerge.models.model import Model, Progress, device_of
from symmerge.models.progress import Counted, Phase, ProgressLike, reporter
from symmerge.symmetry.groups.linalg import one_thread
from symmerge.verification.modules import full_module

ROWS, IMAGES = 32, 256  # inputs made for a verdict
LENGTH, SHORTEST, WORK = 128, 16, 20e9  # tokens of a row, fewer for large models
OTHER_SEED = 1000  # text to judge by is not the text that was learned from
MEMORY = 1.5  # of a model in float32, for its activations, too
ONE_THREAD = 200_000_000  # parameters
BETWEEN, LINE_PARAMETERS = (0.25, 0.5, 0.75), 500_000_000
LINES = "aligned_line", "plain_line"


class Judged(NamedTuple):
    """A model to measure, and what it is."""

    name: str
    kind: str
    model: Model


class MeasuredModel(NamedTuple):
    """What was measured of it."""

    name: str
    kind: str
    metrics: Metrics


def judge(
    merged: ModelLike,
    parents: Sequence[ModelLike],
    data: str | Task | None = None,
    *,
    weights: Sequence[float] | None = None,
    aligned: Sequence[Model] = (),
    plain: bool = True,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressLike = None,
) -> MergeVerdict:
    """Measure a merge beside its parents: `judge(merged, [a, b], "books.txt")`.

    Without data it is measured on text that the parents sample, or on synthetic images. `weights`
    are those of the parents in their plain average (not `plain`: none). Of two `aligned` models the
    line between them is measured, too. One model at a time is in memory.
    """
    result, sources = open_model(merged), [open_model(parent) for parent in parents]
    if reason := cannot_judge(result, data, device):
        raise MismatchError(f"{result.where} cannot be judged: {reason}")
    tell = reporter(progress)
    tell(Phase("measuring the merge beside its parents"))
    judged = [*_judged(result, sources, weights, plain), *_lines(sources, aligned, plain)]
    # The same bytes whatever the number of threads; of a large model that would take too long.
    with one_thread() if result.parameters < ONE_THREAD else nullcontext():
        task = judging_task(sources, data, seed=seed, device=device, progress=tell)
        results = measured(judged, task, device_of(device), tell)
    rows = [VerdictRow(*one) for one in results if one.kind not in LINES]
    verdict = conclude(task.to_record(), rows)
    return replace(verdict, **{kind: _line(results, kind) for kind in LINES})


def cannot_judge(merged: Model, data: str | Task | None, device: str = "cpu") -> str | None:
    """Why a merge cannot be measured, if so."""
    purposes = {kind.purpose for kind in TASKS.values()}
    if not merged.stock:
        return "it is no stock checkpoint"
    if merged.spec.task not in purposes:
        return f"no task measures a {merged.spec.architecture}"
    if data is None and task_of(merged) not in SELF_SOURCES:
        return "a classifier of texts needs data with labels: give --data"
    needed, free = MEMORY * 4 * merged.parameters, free_memory(device_of(device))
    if needed > free:
        return f"that takes {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"
    return None


def judge_alignment(
    result: Aligned | AlignedMany | AlignedFolder | None,
    merged: Model,
    models: Sequence[Model],
    data: str | Task | None = None,
    **how: Any,
) -> MergeVerdict | None:
    """The verdict on a merge of what was aligned (None: of `models` as they are).

    None, with a warning, where it cannot be measured: without data, a merge does not fail for want
    of a verdict. `how` is passed to `judge`.
    """
    reason = cannot_judge(merged, data, how["device"])
    if reason is None:
        try:
            parents, more = _parents(result, models)
            return judge(merged, parents, data, **more, **how)
        except SymmergeError as error:  # a tokenizer that cannot be opened, logits that overflow
            if data is not None:
                raise
            reason = str(error)
    warnings.warn(f"the merge was not measured: {reason}", SymmergeWarning, stacklevel=2)
    return None


def _parents(
    result: Aligned | AlignedMany | AlignedFolder | None, models: Sequence[Model]
) -> tuple[Sequence[Model], dict[str, Any]]:
    """What a merge is compared with, and more options of `judge`."""
    if result is None:
        return models, {}
    if isinstance(result, AlignedFolder):  # what they were before is not there
        return result.models, {"aligned": result.models, "plain": False}
    if isinstance(result, AlignedMany):
        return [models[number] for number in result.universe.members], {}
    # B with A's vocabulary is what can be compared.
    return result.models if result.shared else models, {"aligned": result.models}


def judging_task(
    parents: Sequence[Model],
    data: str | Task | None,
    *,
    seed: int,
    device: str,
    progress: Progress,
) -> Task:
    """What a merge is judged on: the part of the data that nothing is learned from, or inputs
    that the parents make."""
    if isinstance(data, Task):
        return data
    kind, how = task_of(parents[0]), {"device": device, "progress": progress}
    if data not in (None, "self"):
        return make_task(kind, data, parents, part="judge", seed=seed, **how)
    if kind == "image":
        return make_task(kind, "self", parents, samples=IMAGES, seed=seed + OTHER_SEED, **how)
    length = max(SHORTEST, min(LENGTH, int(WORK // parents[0].parameters)))
    more = {"samples": ROWS, "length": length, "seed": seed + OTHER_SEED}
    return make_task(kind, "self", parents, **more, **how)


def _judged(
    merged: Model, parents: Sequence[Model], weights: Sequence[float] | None, plain: bool
) -> list[Judged]:
    judged = [
        Judged(f"{_letter(at)}: {public_name(parent.where)}", PARENT, parent)
        for at, parent in enumerate(parents)
    ]
    if plain and len({parent.spec.fingerprint for parent in parents}) == 1:
        shares = normalised_weights(parents, weights)
        judged.append(Judged("plain average", AVERAGE, mean(parents, shares)))
    return [*judged, Judged("merge", MERGE, merged)]


def _lines(parents: Sequence[Model], aligned: Sequence[Model], plain: bool) -> list[Judged]:
    """Places between two models, aligned and as they were; large models are spared."""
    if len(aligned) != 2 or aligned[0].parameters > LINE_PARAMETERS:
        return []
    pairs = {"aligned_line": aligned}
    if plain and len({parent.spec.fingerprint for parent in parents}) == 1:
        pairs["plain_line"] = parents
    return [
        Judged(f"{t}", kind, interpolate(pair[0], pair[1], t))
        for kind, pair in pairs.items()
        for t in BETWEEN
    ]


def _line(measured: Sequence[MeasuredModel], kind: str) -> tuple[LinePoint, ...] | None:
    """The line with its ends, which are the parents."""
    between = {float(row.name): row.metrics for row in measured if row.kind == kind}
    if not between:
        return None
    a, b = (row.metrics for row in measured if row.kind == PARENT)
    return tuple(LinePoint(t, between.get(t, a if t < 0.5 else b)) for t in (0.0, *BETWEEN, 1.0))


def _letter(at: int) -> str:
    return ascii_uppercase[at] if at < len(ascii_uppercase) else str(at + 1)


@torch.no_grad()
def measured(
    judged: Sequence[Judged],
    task: Task,
    device: torch.device,
    progress: Progress,
    parents: Sequence[str] = (PARENT,),
) -> list[MeasuredModel]:
    """Metrics of each model and of the ensemble of those of kind `parents`, whose answers count
    where there are no labels. One model at a time is in memory.
    """
    batches = list(task.batches)
    answers = []
    for number, (name, _, model) in enumerate(judged):
        module = full_module(model, torch.float32).to(device)
        answers.append([_predict(task, module, batch, device) for batch in batches])
        progress(Counted(f"measured {name}", number + 1, len(judged)))
        del module
    given = [answer for answer, one in zip(answers, judged, strict=True) if one.kind in parents]
    joint = [task.readout.ensemble(each) for each in zip(*given, strict=True)]
    each_model = [
        MeasuredModel(one.name, one.kind, _metrics(task, batches, answer, joint))
        for one, answer in zip(judged, answers, strict=True)
    ]
    if len(given) == 1:
        return each_model
    return [*each_model, MeasuredModel("ensemble", ENSEMBLE, _metrics(task, batches, joint, joint))]


def _predict(task: Task, module: torch.nn.Module, batch: Batch, device: torch.device) -> Tensor:
    moved = {name: tensor.to(device) for name, tensor in batch.items()}
    return task.readout.predict(module, moved).cpu()


def _metrics(
    task: Task, batches: Sequence[Batch], answers: Sequence[Tensor], joint: Sequence[Tensor]
) -> Metrics:
    """Metrics of one model's answers; without labels, against those of the ensemble."""
    if task.metrics:
        scores = [
            task.readout.score(answer, batch)
            for answer, batch in zip(answers, batches, strict=True)
        ]
        return task.summary(scores)
    answer, target = torch.cat(list(answers)).double(), torch.cat(list(joint)).double()
    loss = -(target.exp() * answer).sum(-1)
    agreement = (answer.argmax(-1) == target.argmax(-1)).double()
    values = (float(np.mean(column.numpy())) for column in (loss, agreement))
    return dict(zip(UNLABELLED_METRICS, values, strict=True))
