"""The verb barrier: the loss on the line between models, by several methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from symmerge import report as drawing  # the package: imports matplotlib on first use
from symmerge.aligning.aligned import solve_pair, write_evidence
from symmerge.aligning.comparison import (
    Comparison,
    Recipes,
    check_together,
    line_method,
    simplex_method,
)
from symmerge.aligning.options import METHODS
from symmerge.checkpoints.files import write_text
from symmerge.checkpoints.folders import new_folder
from symmerge.cli import console
from symmerge.cli.options.common import (
    Device,
    Json,
    Models,
    Out,
    Overwrite,
    Seed,
    check_models,
)
from symmerge.cli.options.groups import verb
from symmerge.cli.options.matching import Steps
from symmerge.evaluation.lines import combine_pairs, even_steps, measure_lines, write_curves
from symmerge.evaluation.results import CurveFile, CurvesFile, SimplexFile
from symmerge.evaluation.simplices import POINTS as TOGETHER_POINTS
from symmerge.evaluation.simplices import measure_methods, simplex_places, write_simplex
from symmerge.evaluation.tasks import Task, make_task
from symmerge.matching.efforts import EFFORTS
from symmerge.models.model import Model, device_of, load
from symmerge.models.tables import check_same_table

POINTS = 21
DETAILS = "In detail"
"""The panel of options that few people need."""
REMEDY = "a line has two ends; give two models or more, symmerge barrier A B"


@dataclass(frozen=True)
class Compared:
    """The lines to compare, and the inputs of their methods."""

    method: Annotated[
        str,
        typer.Option(
            help=f"Lines to compare, with commas: none, {', '.join((*EFFORTS, *METHODS))},"
            " or a recipe of align; learned:residual+ff learns these alone."
        ),
    ] = "none,weights"
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Inputs for methods that look at some or learn, as --data of align; never --data.",
            show_default=False,
        ),
    ] = None
    calibration_samples: Annotated[
        int | None,
        typer.Option(
            help="How many samples of --calibration to use.",
            show_default="by task",
            rich_help_panel=DETAILS,
        ),
    ] = None
    steps: Steps = None
    seed: Seed = 0
    device: Device = "cpu"


@dataclass(frozen=True)
class Measured:
    """Task, data and number of points."""

    task: Annotated[
        str, typer.Option(help="What to measure: mlm, clm, image or text.", show_default=False)
    ]
    data: Annotated[
        str,
        typer.Option(
            help="self, digits, python-docs, python-topics, a file (text, .xz, TSV, CSV, JSONL,"
            " .npz), a folder of images, or hf:NAME.",
            show_default=False,
        ),
    ]
    samples: Annotated[
        int | None,
        typer.Option(
            help="How many samples to use.", show_default="by task", rich_help_panel=DETAILS
        ),
    ] = None
    points: Annotated[
        int | None,
        typer.Option(
            help="Points on a line, both ends included.",
            show_default=f"{POINTS}, or {TOGETHER_POINTS} with --together",
        ),
    ] = None
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Of three models or more: bring all together instead of every pair;"
            " every line, the triangle, all merged.",
        ),
    ] = False


@verb(
    examples=(
        "seed-0 seed-1 --task clm --data python-docs --out curve",
        "a b --task clm --data text.txt --method none,fast -o curve",
        "a b c --task clm --data text.txt --together --out plane",
    )
)
def barrier(
    out: Out,
    measured: Measured,
    compared: Compared,
    models: Models = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Measure the loss on the straight line between models: every method, both barriers.

    With three models or more, every pair is aligned and measured: means and standard errors. With
    --together all are aligned at once: barriers of all pairs, of the means of the first 2, 3, ...
    models, and the triangle of the first three.

    Writes curve.json, curve.csv and curve.svg, or simplex.json, simplex.csv and figures.
    """
    together, points, device = measured.together, measured.points, compared.device
    if points is None:
        points = TOGETHER_POINTS if together else POINTS
    even_steps(points)
    folders = check_models(models, REMEDY)
    device_of(device)
    opened = [load(folder) for folder in folders]
    task = _task(measured, opened, compared)  # bad data fails before the solver runs
    comparison = Comparison(**vars(compared))
    recipes = comparison.recipes(opened[0])
    if together:
        check_together(len(folders), recipes)
    recipes = comparison.with_inputs(recipes, opened, measured.data)
    if None in recipes.values():
        check_same_table(opened, "joined by a line")
    measure = _measure_together if together else _measure_pairs
    with new_folder(out, overwrite=overwrite, inputs=folders) as folder:
        record = measure(folder, opened, recipes, task, points, device)
    if json:
        console.show_json(record.to_json())
        return
    about = f"{measured.task} on {measured.data}, {task.samples} samples, {points} points"
    _show(f"Barriers: {about}", record, out)


def _task(measured: Measured, models: Sequence[Model], compared: Compared) -> Task:
    how = {"samples": measured.samples, "seed": compared.seed, "device": compared.device}
    task = make_task(measured.task, measured.data, models, **how)
    task.check_labels()
    return task


def _show(title: str, record: CurveFile | CurvesFile | SimplexFile, out: Path) -> None:
    if isinstance(record, SimplexFile):
        title, rows = f"{title}, {len(record.models)} models together", _simplex_rows(record)
    else:
        pairs = f", {len(record.pairs)} pairs" if isinstance(record, CurvesFile) else ""
        title, rows = f"{title}{pairs}", _line_rows(record)
    console.show_table(f"{title}; wrote {out}", rows)


def _measure_pairs(
    folder: Path,
    models: Sequence[Model],
    recipes: Recipes,
    task: Task,
    points: int,
    device: str,
) -> CurveFile | CurvesFile:
    """Measure the lines of every pair and write them to the folder."""
    pairs, records = list(combinations(models, 2)), []
    for number, (a, b) in enumerate(pairs, 1):
        which = f", pair {number} of {len(pairs)}" if len(pairs) > 1 else ""
        console.note(f"{a.where} and {b.where}{which}")
        alignments = {
            name: solve_pair(a, b, recipe, progress=console.note)
            for name, recipe in recipes.items()
            if recipe
        }
        methods = [line_method(name, a, b, alignments.get(name)) for name in recipes]
        ticks = len(task.batches) * points * len(methods)
        with console.progress(f"evaluating{which}", ticks) as tick:
            how = {"points": points, "device": device, "progress": tick}
            records.append(measure_lines(a, b, methods, task, **how))
        if len(pairs) == 1 and alignments:
            write_evidence([*alignments.values()][-1], folder)
    record = records[0] if len(records) == 1 else combine_pairs(records)
    write_curves(record, folder)
    write_text(folder / "curve.svg", drawing.curve_svg(record))
    return record


def _measure_together(
    folder: Path,
    models: Sequence[Model],
    recipes: Recipes,
    task: Task,
    points: int,
    device: str,
) -> SimplexFile:
    """Measure the simplex of all models by every method and write it to the folder."""
    methods = []
    for name, recipe in recipes.items():
        console.note(f"{len(models)} models, {name}")
        methods.append(simplex_method(name, models, recipe, console.note))
    ticks = len(task.batches) * len(simplex_places(len(models), points)) * len(methods)
    with console.progress("evaluating", ticks) as tick:
        how = {"points": points, "device": device, "progress": tick}
        record = measure_methods(models, methods, task, **how)
    write_simplex(record, folder)
    for file, text in drawing.simplex_svgs(record).items():
        write_text(folder / file, text)
    return record


def _line_rows(record: CurveFile | CurvesFile) -> Iterator[dict[str, object]]:
    """Both barriers of every method; means and standard errors over several pairs."""
    if isinstance(record, CurveFile):
        for method in record.methods:
            yield {
                "method": method.label,
                "barrier over the mean": method.barrier_mean,
                "barrier over the line": method.barrier_linear,
            }
        return
    for method in record.pairs[0].methods:
        means = record.summary[method.name]
        yield {
            "method": method.label,
            "barrier over the mean": means.barrier_mean.mean,
            "standard error over the mean": means.barrier_mean.error,
            "barrier over the line": means.barrier_linear.mean,
            "standard error over the line": means.barrier_linear.error,
        }


def _simplex_rows(record: SimplexFile) -> Iterator[dict[str, object]]:
    """Mean barrier of the pairs, and barrier of the mean of all models."""
    count = len(record.models)
    for method in record.methods:
        pairs = [method.barriers[a][b] for a, b in combinations(range(count), 2)]
        yield {
            "method": method.label,
            "mean barrier of a pair": fmean(pairs),
            f"barrier of all {count} merged": method.means[-1].barrier,
        }
