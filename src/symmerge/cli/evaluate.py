"""The verb evaluate: loss and metrics of checkpoints side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from symmerge.checkpoints.files import refuse_foreign
from symmerge.cli import console
from symmerge.cli.options.common import Device, Json, Seed
from symmerge.cli.options.groups import verb
from symmerge.evaluation.evaluation_results import EvaluationFile
from symmerge.evaluation.harness import Harness
from symmerge.evaluation.side_by_side import describe_data
from symmerge.evaluation.side_by_side import evaluate as evaluate_models
from symmerge.models.model import load


@dataclass(frozen=True)
class Harnessed:
    """Options of lm-eval."""

    panel: ClassVar[str] = "lm-eval"
    lm_eval: Annotated[
        str | None,
        typer.Option(
            "--lm-eval",
            help="Tasks of the lm-eval package (must be installed), separated by commas. They"
            " replace the loss unless --data is given as well.",
            metavar="TASKS",
            show_default=False,
        ),
    ] = None
    lm_eval_include: Annotated[
        Path | None,
        typer.Option(
            "--lm-eval-include",
            help="A folder with more tasks for --lm-eval, in YAML; code that they name is run.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None


@verb(
    examples=(
        "merged seed-0 seed-1 --data books.txt",
        "classifier --data digits",
        "merged seed-0 --lm-eval lambada_openai,piqa",
    )
)
def evaluate(
    harnessed: Harnessed,
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="One or more checkpoint folders; sizes may differ.",
            metavar="MODEL ...",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="What to measure on: self, digits, python-docs, python-topics, a file (text, .xz,"
            " TSV, CSV, JSONL, .npz), a folder of images, or hf:NAME.",
            show_default="self, for language models",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Number of samples to use.", show_default="by task")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write the result, as JSON.", show_default=False),
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Compare the loss and metrics of checkpoints and of their ensemble.

    The task follows from the models: perplexity for language models, accuracy for classifiers.
    Without data, language models are measured on text that they sample themselves.
    """
    if out is not None:
        refuse_foreign(out, EvaluationFile.SCHEMA)
    opened = [load(folder) for folder in models or ()]
    how = {"samples": samples, "seed": seed, "device": device}
    result = evaluate_models(
        opened, data, **how, lm_eval=_harness(harnessed, how), progress=console.note
    )
    if out is not None:
        result.write(out)
    if json:
        console.show_json(result.to_json())
        return
    title = f"lm-eval {harnessed.lm_eval}"
    if result.task:
        about = describe_data(opened[0], data)
        title = f"{result.task.name} on {about}, {result.task.samples} samples"
    console.show_table(f"{title}{f'; wrote {out}' if out else ''}", _rows(result))
    if len(opened) > 1 and result.task and result.ensemble is None:
        console.say("no ensemble: the models have different outputs")


def _harness(harnessed: Harnessed, how: dict[str, object]) -> Harness | None:
    tasks = [name.strip() for name in (harnessed.lm_eval or "").split(",") if name.strip()]
    if not tasks:
        return None
    return Harness(tasks=tuple(tasks), include=harnessed.lm_eval_include, **how)  # type: ignore[arg-type]


def _rows(result: EvaluationFile) -> Iterator[dict[str, object]]:
    """A row per model and one of the ensemble; on a terminal the best model is marked."""
    first, *others = result.models
    marks = console.out.is_terminal and bool(others)
    for number, (where, scores) in enumerate(result.rows()):
        row: dict[str, object] = {"model": where}
        for name in first.scores:
            alone = number <= len(others)
            best = alone and scores[name] == result.best(name)
            mark = (" *" if best else "  ") if marks else ""
            row[name] = f"{scores[name]:.4g}{mark}" if name in scores else ""
        yield row
