"""Tasks by name, checked against the models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from symmerge.errors import MismatchError
from symmerge.evaluation.tasks.base import Task
from symmerge.evaluation.tasks.image_classification import image_task
from symmerge.evaluation.tasks.language import causal_task, masked_task
from symmerge.evaluation.tasks.sampling import Part, Sampling
from symmerge.evaluation.tasks.seq2seq import seq2seq_task
from symmerge.evaluation.tasks.text_classification import text_task
from symmerge.models.model import Model
from symmerge.models.progress import Progress

OWN = "own"  # the task of a user's own module


class TaskKind(NamedTuple):
    """One kind of task: which models have it, and how to make it."""

    purposes: tuple[str, ...]
    make: Callable[[Sequence[Model], str, Sampling], Task]


def _not_read(models: Sequence[Model], data: object, sampling: Sampling) -> Task:
    given = data if isinstance(data, str) else f"a {type(data).__name__}"
    raise MismatchError(
        f"data {given}: files and data sets are read as stock classes take them, and"
        f" {models[0].where} is a module of your own; give batches with"
        " derivation.task([(inputs, targets), ...], loss=...)"
    )


TASKS = {
    "mlm": TaskKind(("masked-lm",), masked_task),
    "clm": TaskKind(("causal-lm",), causal_task),
    "seq2seq": TaskKind(("seq2seq-lm",), seq2seq_task),
    "image": TaskKind(("image-classification", "image-text"), image_task),
    "text": TaskKind(("text-classification",), text_task),
    OWN: TaskKind(("custom",), _not_read),
}
SELF_SOURCES = {
    "mlm": "the models sample text",
    "clm": "the models sample text",
    "seq2seq": "the models answer themselves",
    "image": "dead leaves are drawn",
}
"""Task -> where its data-free inputs (`self`) come from."""
SELF_LABELLED = ("mlm", "clm", "seq2seq")  # the labels are the text itself


def make_task(
    name: str,
    data: str,
    models: Sequence[Model],
    *,
    samples: int | None = None,
    max_samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
    part: Part = "all",
) -> Task:
    """A task with its data: `make_task("clm", "python-docs", [a, b], samples=64)`.

    Models are of one architecture; the first has the tokenizer or image processor. `data` is

    - `self`: text that the models sample, or synthetic images without labels (for models that score
      images for texts, with texts of random tokens)
    - `digits`, `python-docs`, `python-code` or `python-topics` (the test split; `digits:train` is
      the other)
    - a file (text, .xz, TSV, CSV, JSONL, .npz), or a folder of images with a subfolder per class
    - a Hugging Face data set (`hf:NAME`, or a folder)

    Exactly `samples` are taken, or at most `max_samples`; text in blocks of `length` tokens.
    `device` is where models sample text. `part` "learn" leaves out the samples that "judge" takes.
    """
    if name not in TASKS:
        raise MismatchError(f"task {name}: choose one of {', '.join(TASKS)}")
    if samples is not None and samples < 1:
        raise MismatchError(f"samples {samples}: ask for at least one")
    for model in models:
        if model.spec.task not in TASKS[name].purposes:
            raise MismatchError(
                f"{model.where} is a {model.spec.architecture}, for {model.spec.task}:"
                f" the task {name} is for {' and '.join(TASKS[name].purposes)};"
                f" use {task_of(model)}"
            )
    if data == "self" and name not in SELF_SOURCES:
        raise MismatchError(
            f"data self: no inputs can be generated for the task {name},"
            f" only for {', '.join(SELF_SOURCES)}; give labelled data"
        )
    sampling = Sampling(
        samples=samples,
        max_samples=max_samples,
        length=length,
        seed=seed,
        device=device,
        progress=progress,
        part=part,
    )
    return TASKS[name].make(models, data, sampling)


def task_of(model: Model) -> str:
    """The task of a model's head, by name."""
    for name, kind in TASKS.items():
        if model.spec.task in kind.purposes:
            return name
    remedy = "measure it elsewhere"
    if model.spec.pooled is not None:
        remedy = (
            "if its pooled output starts with class scores, say so in its config.json"
            ' ("problem_type": "single_label_classification", and their number as "num_labels")'
        )
    raise MismatchError(
        f"{model.where} is a {model.spec.architecture}, for {model.spec.task}, which no task"
        f" measures: {remedy}"
    )
