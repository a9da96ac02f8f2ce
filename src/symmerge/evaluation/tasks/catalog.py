"""A task by name, checked against the model that is to do it."""

from __future__ import annotations

from collections.abc import Sequence

from symmerge.errors import MismatchError
from symmerge.evaluation.tasks.base import Task
from symmerge.evaluation.tasks.labelled import image, text
from symmerge.evaluation.tasks.language import causal, masked
from symmerge.models.model import Model

# The name on the command line -> what a model must be for, and who makes the task.
TASKS = {
    "mlm": ("masked-lm", masked),
    "clm": ("causal-lm", causal),
    "image": ("image-classification", image),
    "text": ("text-classification", text),
}
SELF_SOURCES = {
    "mlm": "the models write text",
    "clm": "the models write text",
    "image": "dead leaves are drawn",
}
"""Tasks that have inputs without data (`self`), and where those come from."""
SELF_LABELLED = ("mlm", "clm")  # text is its own label


def make_task(
    name: str,
    data: str,
    models: Sequence[Model],
    *,
    samples: int | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Task:
    """A task with its data, for models of one architecture: `make_task("clm", "python-docs", [a, b], samples=64)`.

    Tokenizer or image processor come from the first model's folder. `data` is `self` (text the models write, or pictures without labels that are drawn for them), `digits` or `python-docs` (the part
    held out from training; `digits:train` is the other), a file (text, .xz, TSV, CSV, JSONL, .npz), a folder of pictures, or a Hugging Face data
    set (`hf:NAME`, or a folder). `samples` must be there; `max_samples` takes as many as there are, up to that. `device` is where models write.
    """
    if name not in TASKS:
        raise MismatchError(f"task {name}: there are {', '.join(TASKS)}")
    if samples is not None and samples < 1:
        raise MismatchError(f"samples {samples}: ask for at least one")
    wanted, make = TASKS[name]
    for model in models:
        if model.spec.task != wanted:
            raise MismatchError(
                f"{model.where} is a {model.spec.architecture}, for {model.spec.task}: the task {name} is for {wanted}; use {task_of(model)}"
            )
    if data == "self" and name not in SELF_SOURCES:
        raise MismatchError(
            f"data self: nobody makes inputs for the task {name}, only for {', '.join(SELF_SOURCES)}; give it data with labels"
        )
    return make(
        models,
        data,
        samples=samples,
        max_samples=max_samples,
        seed=seed,
        **({"device": device} if data == "self" else {}),
    )


def task_of(model: Model) -> str:
    """The name of the task that a model is for."""
    found = next((name for name, (purpose, _) in TASKS.items() if purpose == model.spec.task), None)
    if found is None:
        raise MismatchError(
            f"{model.where} is a {model.spec.architecture}, for {model.spec.task}, which no task measures; if what it pools begins with class scores,"
            ' say so in its config.json ("problem_type": "single_label_classification", and their number as "num_labels")'
        )
    return found
