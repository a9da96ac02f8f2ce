"""Measure models beside one another: on data, or on inputs that their parents make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from symmerge.checkpoints.card import public_name
from symmerge.evaluation.results import Metrics
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.evaluation.tasks.base import Batch
from symmerge.evaluation.tasks.readouts import TokenReadout
from symmerge.merging.verdict_results import ENSEMBLE, PARENT
from symmerge.merging.verdict_words import UNLABELLED_METRICS
from symmerge.models.model import Model
from symmerge.models.progress import Counted, Progress
from symmerge.verification.modules import full_module

ROWS, IMAGES = 32, 256  # inputs made for a verdict
LENGTH, SHORTEST, WORK = 128, 16, 20e9  # tokens of a row, fewer for large models
OTHER_SEED = 1000  # text to judge by is not the text that was learned from
SKILL_SAMPLES = 64  # of each skill


class Judged(NamedTuple):
    """A model to measure, and what it is."""

    name: str
    kind: str
    model: Model


class MeasuredModel(NamedTuple):
    """What was measured of it: on everything, then on each skill."""

    name: str
    kind: str
    metrics: Metrics
    skills: tuple[Metrics, ...]


class Judging(NamedTuple):
    """What is measured: a task, and the skills that are told apart in it or beside it."""

    task: Task
    skills: Mapping[str, Task]


def judging_on(
    parents: Sequence[Model],
    data: str | Task | None,
    skills: Sequence[str] = (),
    *,
    seed: int,
    device: str,
    progress: Progress,
) -> Judging:
    """What a merge is judged on: the part of the data that nothing is learned from, or inputs
    that the parents make, each parent's text apart."""
    kind, how = task_of(parents[0]), {"device": device, "progress": progress}
    given = {
        public_name(name): make_task(kind, name, parents, max_samples=SKILL_SAMPLES, **how)
        for name in skills
    }
    if isinstance(data, Task):
        return Judging(data, given)
    if data not in (None, "self"):
        return Judging(make_task(kind, data, parents, part="judge", seed=seed, **how), given)
    if given:
        return Judging(_joined(list(given.values())), given)
    if kind == "image":
        more = {"samples": IMAGES, "seed": seed + OTHER_SEED}
        return Judging(make_task(kind, "self", parents, **more, **how), {})
    length = max(SHORTEST, min(LENGTH, int(WORK // parents[0].parameters)))
    more = {"length": length, "seed": seed + OTHER_SEED, **how}
    rows = [len(share) for share in np.array_split(range(ROWS), len(parents))]
    texts = {
        f"text of {letter(at)}": make_task(kind, "self", [parent], samples=count, **more)
        for at, (parent, count) in enumerate(zip(parents, rows, strict=True))
        if count
    }
    return Judging(_joined(list(texts.values())), texts)


def _joined(tasks: Sequence[Task]) -> Task:
    """All samples of some tasks of one kind."""
    first, batches = tasks[0], [task.batches for task in tasks]
    readout = first.readout
    if isinstance(readout, TokenReadout) and len(tasks) > 1:  # characters per token differ
        readout = replace(readout, characters_per_token=None)
    return replace(
        first,
        data=", ".join(dict.fromkeys(task.data for task in tasks)),
        samples=sum(task.samples for task in tasks),
        batches=[batch for each in batches for batch in each],
        readout=readout,
    )


def letter(at: int) -> str:
    """The name of a parent: A, B, ...

    >>> letter(1), letter(26)
    ('B', '27')
    """
    return ascii_uppercase[at] if at < len(ascii_uppercase) else str(at + 1)


@torch.no_grad()
def measure(
    judged: Sequence[Judged],
    judging: Judging,
    device: torch.device,
    progress: Progress,
    parents: Sequence[str] = (PARENT,),
) -> list[MeasuredModel]:
    """Metrics of each model, and of the ensemble of those of kind `parents` if there are several.

    Their answers are the truth where there are no labels. One model at a time is in memory.
    """
    tasks = [judging.task, *judging.skills.values()]
    batches = [list(task.batches) for task in tasks]
    answers: list[list[list[Tensor]]] = []  # of each model, for each task
    for number, (name, _, model) in enumerate(judged):
        module = full_module(model, torch.float32, device)
        answers.append([])
        for task, inputs in zip(tasks, batches, strict=True):
            answers[-1].append([_predict(task, module, batch, device) for batch in inputs])
        progress(Counted(f"measured {name}", number + 1, len(judged)))
        del module
    given = [answer for answer, one in zip(answers, judged, strict=True) if one.kind in parents]
    joint = [
        [task.readout.ensemble(each) for each in zip(*theirs, strict=True)]
        for task, *theirs in zip(tasks, *given, strict=True)
    ]
    named = [(one.name, one.kind) for one in judged]
    if len(given) > 1:
        named, answers = [*named, ("ensemble", ENSEMBLE)], [*answers, joint]
    return [
        MeasuredModel(
            *name,
            *_on_all(
                _metrics(task, inputs, theirs, together)
                for task, inputs, theirs, together in zip(tasks, batches, mine, joint, strict=True)
            ),
        )
        for name, mine in zip(named, answers, strict=True)
    ]


def _on_all(metrics: Iterable[Metrics]) -> tuple[Metrics, tuple[Metrics, ...]]:
    first, *others = metrics
    return first, tuple(others)


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
