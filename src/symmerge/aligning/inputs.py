"""Inputs of an alignment: models, widened to the widest, and task data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike
from typing import get_args

from symmerge.aligning.choices import check_choice
from symmerge.distributed import local_device
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.evaluation.tasks.catalog import OWN
from symmerge.evaluation.tasks.sampling import Part
from symmerge.matching.learning.data import max_inputs
from symmerge.models.label_sets import side_by_side
from symmerge.models.model import Model, load
from symmerge.models.tables import check_same_kind, layer_count
from symmerge.models.widening import Units, widen

ModelLike = Model | str | PathLike[str]
"""A model, or the folder of a checkpoint."""

_SELF = "or self, which needs no data"
_TEXT = f"a text file, python-docs:train or hf:NAME; {_SELF}: text sampled from the models"
INPUTS = {
    "mlm": _TEXT,
    "clm": _TEXT,
    "seq2seq": _TEXT,
    "image": "digits:train, an .npz file, a folder with a subfolder of images per class, or"
    f" hf:NAME; {_SELF}: synthetic images",
    "text": "a TSV, CSV or JSONL file with the columns label and text, or hf:NAME",
    OWN: "derivation.task([(inputs, targets), ...], loss=...)",
}
"""The data that each task takes, for messages."""


def open_model(model: ModelLike) -> Model:
    """Load a model from its folder; a loaded one is returned unchanged."""
    return model if isinstance(model, Model) else load(model)


def open_models(models: Sequence[ModelLike], *, units: str = "zero") -> list[Model]:
    """Open all models; narrow ones are widened to the widest, with a warning.

    A widened model computes the same function. Its extra units are dead (`units="zero"`) or
    copies that share the original's output (`"split"`). Classifiers of different labels get heads
    with the labels of all, and keep their functions, too.
    """
    check_choice("--units", units, get_args(Units))
    opened = [open_model(model) for model in models]
    check_same_kind(opened, "aligned or merged")
    opened = _with_one_set_of_labels(opened)
    widest = max(opened, key=lambda model: model.parameters)
    return [_as_wide_as(model, widest, units) for model in opened]


def _with_one_set_of_labels(models: list[Model]) -> list[Model]:
    together = side_by_side(models)
    changed = [old.where for old, new in zip(models, together, strict=True) if old is not new]
    if changed:
        warnings.warn(
            f"{' and '.join(changed)} are classifiers with different labels: their heads are kept"
            f" side by side ({together[0].spec.sizes['label']} labels)",
            SymmergeWarning,
            stacklevel=4,
        )
    return together


def _as_wide_as(model: Model, widest: Model, units: str) -> Model:
    if not _narrower(model, widest):
        return model
    warnings.warn(
        f"{model.where} is narrower than {widest.where}: it was widened, which does not change its"
        " function",
        SymmergeWarning,
        stacklevel=4,
    )
    return widen(model, widest, units=units)  # type: ignore[arg-type]


def _narrower(model: Model, widest: Model) -> bool:
    """Whether any hidden space common to both differs in size, or the depth does.

    `widen` refuses models of another depth, in clearer words than a list of tensors.
    """
    common = {*model.spec.hidden} & {*widest.spec.hidden}
    sizes = (model.spec.sizes, widest.spec.sizes)
    return layer_count(model) != layer_count(widest) or any(
        sizes[0][name] != sizes[1][name] for name in common
    )


def make_inputs(
    models: Sequence[Model],
    data: str,
    *,
    samples: int | None = None,
    learned: bool = False,
    seed: int = 0,
    device: str = "cpu",
    part: Part = "all",
) -> Task:
    """The models' native task on some data; learned matching takes more samples."""
    name = task_of(models[0])
    return make_task(
        name,
        data,
        models,
        samples=samples,
        max_samples=max_inputs(name, data) if learned else None,
        seed=seed,
        device=local_device(device),
        part=part,
    )


def no_inputs(model: Model, what: str, option: str = "--data") -> MismatchError:
    """The error for a method that needs inputs and has none."""
    return MismatchError(f"{what}: give {option}: {INPUTS[task_of(model)]}")
