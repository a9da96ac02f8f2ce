"""Evaluate checkpoints side by side on the same data: `evaluate`. One model at a time in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from symmerge.errors import MismatchError
from symmerge.evaluation.evaluation_results import (
    LOWER_IS_BETTER,
    EvaluatedModel,
    EvaluationFile,
)
from symmerge.evaluation.harness import Harness, harness_scores
from symmerge.evaluation.lines import measurement_versions, model_record
from symmerge.evaluation.mixture import check_finite
from symmerge.evaluation.results import Metrics
from symmerge.evaluation.tasks import SELF_SOURCES, Task, make_task, task_of
from symmerge.evaluation.tasks.base import Batch
from symmerge.evaluation.tasks.catalog import OWN, SELF_LABELLED
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers, max_length
from symmerge.models.model import (
    Model,
    device_of,
    load,
)
from symmerge.models.progress import Counted, Phase, Progress
from symmerge.verification.inputs import image_shape
from symmerge.verification.modules import full_module

Source = Model | str | os.PathLike[str]
NEEDS_DATA = {
    "image": "synthetic images have no labels; give --data: digits, an .npz file, a folder with a"
    " subfolder of images per class, or hf:NAME",
    "text": "there is no text without data; give --data: a TSV, CSV or JSONL file with the columns"
    " label and text, or hf:NAME",
    OWN: "there are no inputs for a module of your own; give derivation.task([(inputs, targets),"
    " ...], loss=...)",
}
"""Why `self` is no data for a task, and what is."""


def evaluate(
    models: Source | Sequence[Source],
    task: Task | str | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    lm_eval: Harness | None = None,
    progress: Progress | None = None,
) -> EvaluationFile:
    """Loss and metrics of checkpoints side by side: `evaluate(["a", "b"], "books.txt")`.

    `task` is a task, or data for the models' own task, as for `make_task`; without any, language
    models are measured on text they sample. Sizes may differ. Of two models or more the ensemble
    is measured, too. `lm_eval` names tasks of the lm-eval package; alone, no other data is used.
    """
    device_of(device)
    opened = [_open(one) for one in _listed(models)]
    if lm_eval is not None:
        lm_eval.check(opened)  # before anything is computed
    tasks: list[Task] | None = None
    if task is not None or lm_eval is None:
        given = {"samples": samples, "seed": seed, "device": device}
        tasks = [task] * len(opened) if isinstance(task, Task) else _tasks(opened, task, given)
    measured = [
        _measured(model, tasks[number] if tasks else None, device, progress)
        for number, model in enumerate(opened)
    ]
    scores = [harness_scores(model, lm_eval, progress=progress) for model in opened]
    lower = {name for one in scores for name in one.lower_is_better}
    return EvaluationFile(
        task=tasks[0].to_record() if tasks else None,
        models=tuple(
            EvaluatedModel(**vars(model_record(model)), metrics=one.metrics, lm_eval=harness.values)
            for model, one, harness in zip(opened, measured, scores, strict=True)
        ),
        ensemble=_ensemble(tasks[0], measured) if tasks else None,
        lower_is_better=(*LOWER_IS_BETTER, *sorted(lower)),
        versions=measurement_versions(),
    )


def _listed(models: Source | Sequence[Source]) -> list[Source]:
    many = isinstance(models, Sequence) and not isinstance(models, str)
    listed = list(models) if many else [models]  # type: ignore[list-item, arg-type]
    if not listed:
        raise MismatchError("no model: give one or more: symmerge evaluate MODEL")
    return listed  # type: ignore[return-value]


def _open(model: Source) -> Model:
    return model if isinstance(model, Model) else load(model)


def usual_data(model: Model) -> str:
    """The data where none is given: text that the models sample, where there is such a thing."""
    name = task_of(model)
    if name not in SELF_LABELLED:
        raise MismatchError(f"{model.where}: no data: {NEEDS_DATA[name]}")
    return "self"


def describe_data(model: Model, data: str | None) -> str:
    """The data for people; where none was given, it says what stands in for it."""
    if data not in (None, "self"):
        return str(data)
    missing = "" if data else "; no data was given"
    return f"self-generated inputs ({SELF_SOURCES[task_of(model)]}{missing})"


# Tasks: one for all models, or one each where they take inputs in different forms.


def _tasks(models: Sequence[Model], data: str | None, how: Mapping[str, object]) -> list[Task]:
    name = task_of(models[0])
    for other in models[1:]:
        if task_of(other) != name:
            raise MismatchError(
                f"{models[0].where} is for {models[0].spec.task}, {other.where} for"
                f" {other.spec.task}: evaluate them one by one"
            )
    data = data or usual_data(models[0])
    if name == "image":
        return _image_tasks(models, data, how)
    check_same_tokenizers(models)
    sizes = {model.spec.sizes["vocabulary"] for model in models}
    if data == "self" and len(sizes) > 1:
        raise MismatchError(
            f"{' and '.join(model.where for model in models)} have vocabularies of"
            f" {' and '.join(map(str, sorted(sizes)))} tokens and cannot read each other's text:"
            " give --data, or evaluate them one by one"
        )
    # All must be able to read a block: the first model says how long it is.
    shortest_first = sorted(models, key=max_length) if len(models) > 1 else list(models)
    task = make_task(name, data, shortest_first, **how)  # type: ignore[arg-type]
    task.check_labels()
    return [task] * len(models)


def _image_tasks(models: Sequence[Model], data: str, how: Mapping[str, object]) -> list[Task]:
    """The same images for all, in the form that each model's image processor gives them."""
    made: dict[object, Task] = {}
    for model in models:
        if (key := _image_form(model)) not in made:
            task = make_task("image", data, [model], **how)  # type: ignore[arg-type]
            task.check_labels()
            made[key] = task
    return [made[_image_form(model)] for model in models]


def _image_form(model: Model) -> object:
    labels = repr(sorted((model.config.get("id2label") or {}).items()))
    files = [file for file in model.files if file.name == "preprocessor_config.json"]
    return image_shape(model), labels, tuple(Path(file).read_bytes() for file in files)


# One pass of one model over its data.


@dataclass(frozen=True)
class _Measured:
    """A model's metrics, its predictions, and the labels they were compared with."""

    metrics: Metrics
    predictions: tuple[Tensor, ...] = ()
    labels: tuple[Batch, ...] = ()


@torch.no_grad()
def _measured(model: Model, task: Task | None, device: str, progress: Progress | None) -> _Measured:
    if task is None:
        return _Measured({})
    if progress:
        progress(Phase(f"measuring {model.where}"))
    module, readout = full_module(model, torch.float32, device), task.readout
    predictions, labels, columns = [], [], []
    for number, batch in enumerate(task.batches, 1):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        prediction = readout.predict(module, batch)
        columns.append(readout.score(prediction, batch))
        predictions.append(prediction.cpu())
        labels.append({"labels": batch["labels"].cpu()})
        if progress:
            total = len(task.batches)
            progress(Counted(f"{model.where}: batch {number} of {total}", number, total))
    metrics = check_finite(task.summary(columns), f"of {model.where}")
    return _Measured(metrics, tuple(predictions), tuple(labels))


def _ensemble(task: Task, measured: Sequence[_Measured]) -> Metrics | None:
    """Metrics of the mean prediction of two models or more; None where outputs do not match."""
    first, readout = measured[0], task.readout
    if len(measured) < 2 or not all(_matches(first, other) for other in measured):
        return None
    columns = [
        readout.score(readout.ensemble(predictions), batch)
        for batch, predictions in zip(
            first.labels, zip(*(one.predictions for one in measured), strict=True), strict=True
        )
    ]
    return task.summary(columns)


def _matches(first: _Measured, other: _Measured) -> bool:
    return len(first.labels) == len(other.labels) and all(
        torch.equal(a["labels"], b["labels"]) and x.shape == y.shape
        for a, b, x, y in zip(
            first.labels, other.labels, first.predictions, other.predictions, strict=True
        )
    )
