"""The verb barrier: the loss on the line between models, by several methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from symmerge import report as drawing  # the package: imports matplotlib on first use
from symmerge.aligning.aligned import solve_pair, write_evidence
from symmerge.aligning.comparison import (
    Comparison,
    Recipes,
    aligned_line,
    aligned_simplex,
    check_together,
    line_method,
    simplex_method,
)
from symmerge.aligning.folders import AlignedFolder, lone_folder
from symmerge.aligning.options import METHODS
from symmerge.checkpoints.files import write_text
from symmerge.checkpoints.folders import new_folder, refuse
from symmerge.cli import console
from symmerge.cli.barrier_tables import show_barriers
from symmerge.cli.options.common import (
    Device,
    Json,
    Overwrite,
    Seed,
    check_models,
)
from symmerge.cli.options.groups import verb
from symmerge.cli.options.matching import Steps
from symmerge.errors import MismatchError
from symmerge.evaluation.lines import (
    by_circuits,
    combine_pairs,
    even_steps,
    measure_lines,
    write_curves,
)
from symmerge.evaluation.results import CurveFile, CurvesFile, SimplexFile
from symmerge.evaluation.side_by_side import describe_data, usual_data
from symmerge.evaluation.simplices import POINTS as TOGETHER_POINTS
from symmerge.evaluation.simplices import measure_methods, simplex_places, write_simplex
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.matching.efforts import EFFORTS
from symmerge.models.circuit_form import check_circuits
from symmerge.models.label_sets import side_by_side
from symmerge.models.model import Model, device_of, load
from symmerge.models.progress import Phase
from symmerge.models.tables import check_same_table

POINTS, METHODS_USUAL = 21, "none,weights"
REMEDY = "a line has two ends; give two or more models: symmerge barrier A B"


@dataclass(frozen=True)
class Compared:
    """The lines to compare, and the inputs of their methods."""

    method: Annotated[
        str | None,
        typer.Option(
            help=f"Lines to compare, separated by commas: none, {', '.join((*EFFORTS, *METHODS))},"
            " or a recipe of align; learned:residual+ff learns only these spaces.",
            show_default=f"{METHODS_USUAL}; an aligned folder as it is",
        ),
    ] = None
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Inputs for methods that look at activations or learn; must differ from --data.",
            show_default=False,
        ),
    ] = None
    steps: Steps = None
    seed: Seed = 0
    device: Device = "cpu"


@dataclass(frozen=True)
class Measured:
    """Data and number of points."""

    data: Annotated[
        str | None,
        typer.Option(
            help="What to measure on: self, digits, python-docs, python-topics, a file (text, .xz,"
            " TSV, CSV, JSONL, .npz), a folder of images, or hf:NAME.",
            show_default="self, for language models",
        ),
    ] = None
    points: Annotated[
        int | None,
        typer.Option(
            help="Number of points on a line, including both ends.",
            show_default=f"{POINTS}, or {TOGETHER_POINTS} with --together",
        ),
    ] = None
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="For three or more models: align all together instead of pair by pair, and"
            " measure every line, the triangle and the merge of all.",
        ),
    ] = False


@dataclass(frozen=True)
class Further:
    """Options that few people need."""

    panel: ClassVar[str] = "Details"
    task: Annotated[
        str | None,
        typer.Option(
            help="What to measure: mlm, clm, seq2seq, image or text.",
            show_default="the models' own",
        ),
    ] = None
    samples: Annotated[
        int | None, typer.Option(help="Number of samples to use.", show_default="by task")
    ] = None
    calibration_samples: Annotated[
        int | None,
        typer.Option(help="Number of samples of --calibration to use.", show_default="by task"),
    ] = None
    circuits: Annotated[
        bool,
        typer.Option(
            "--circuits",
            help="Also measure every line with attention averaged as circuits, as some papers do"
            " (not stock models; for comparison).",
        ),
    ] = False


@verb(
    examples=(
        "seed-0 seed-1 --data python-docs",
        "a b --data text.txt --method none,fast --out curve",
        "aligned --data text.txt --out curve",
    )
)
def barrier(
    measured: Measured,
    compared: Compared,
    further: Further,
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Two or more checkpoint folders of one architecture, or one folder written by"
            " align.",
            metavar="A B | DIR",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Also write curves and figures to this folder.", show_default=False
        ),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Measure the loss on the straight line between models, for one or more methods.

    With three or more models, every pair is aligned and measured; means and standard errors are
    shown. With --together, all are aligned at once: you get the barriers of all pairs, of the
    means of the first 2, 3, ... models, and the triangle of the first three. The contents of a
    folder written by align are measured as they are. The task follows from the models; without
    data, language models are measured on text they sample.

    --out receives curve.json, curve.csv and curve.svg, or simplex.json, simplex.csv and figures.
    """
    together, points, device = measured.together, measured.points, compared.device
    if points is None:
        points = TOGETHER_POINTS if together else POINTS
    even_steps(points)
    folder = lone_folder(models or ())
    folders = tuple(models or ()) if folder else check_models(models, REMEDY)
    device_of(device)
    if out is not None:
        refuse(out.absolute(), overwrite, folders)  # before any work
    opened = list(folder.models) if folder else [load(path) for path in folders]
    _check_circuits(further.circuits, opened[0], together)
    opened = side_by_side(opened, "joined by a line")
    data = measured.data or usual_data(opened[0])
    task = _task(data, further, opened, compared)  # bad data fails before the solver runs
    lines = _lines(folder, opened, compared, further, data, together)
    with _new_folder(out, overwrite, folders) as target:
        if together:
            record = _measure_together(target, opened, lines, task, points, device)
        else:
            record = _measure_pairs(target, opened, lines, task, points, device)
    if json:
        console.show_json(record.to_json())
        return
    about = describe_data(opened[0], measured.data)
    show_barriers(f"{task.name} on {about}, {task.samples} samples, {points} points", record, out)


@dataclass(frozen=True)
class _Lines:
    """What is measured: the folder as it is, and models aligned by recipes."""

    folder: AlignedFolder | None
    recipes: Recipes
    circuits: bool = False


def _lines(
    folder: AlignedFolder | None,
    models: Sequence[Model],
    compared: Compared,
    further: Further,
    data: str,
    together: bool,
) -> _Lines:
    """The methods with their inputs; refused where they do not fit."""
    if folder and compared.method is None:
        if together:
            check_together(len(models), {})
        return _Lines(folder, {}, further.circuits)
    options = {**vars(compared), "method": compared.method or METHODS_USUAL}
    comparison = Comparison(**options, calibration_samples=further.calibration_samples)
    recipes = comparison.beside_aligned(folder) if folder else comparison.recipes(models[0])
    if together:
        check_together(len(models), recipes)
    recipes = comparison.with_inputs(recipes, models, data)
    if None in recipes.values():
        check_same_table(models, "joined by a line")
    return _Lines(folder, recipes, further.circuits)


def _check_circuits(circuits: bool, model: Model, together: bool) -> None:
    """Refuse --circuits where there are none, and of many models, before any work."""
    if circuits and together:
        raise MismatchError("--circuits measures lines between pairs: leave out --together")
    if circuits:
        check_circuits(model)


def _task(data: str, further: Further, models: Sequence[Model], compared: Compared) -> Task:
    how = {"samples": further.samples, "seed": compared.seed, "device": compared.device}
    task = make_task(further.task or task_of(models[0]), data, models, **how)
    task.check_labels()
    return task


@contextmanager
def _new_folder(
    out: Path | None, overwrite: bool, inputs: tuple[Path, ...]
) -> Iterator[Path | None]:
    """The folder to write to, or None where nothing is to be written."""
    if out is None:
        yield None
        return
    with new_folder(out, overwrite=overwrite, inputs=inputs) as folder:
        yield folder


def _measure_pairs(
    target: Path | None,
    models: Sequence[Model],
    lines: _Lines,
    task: Task,
    points: int,
    device: str,
) -> CurveFile | CurvesFile:
    """Measure the lines of every pair; written to the folder, if there is one."""
    pairs, records = list(combinations(models, 2)), []
    for number, (a, b) in enumerate(pairs, 1):
        which = f", pair {number} of {len(pairs)}" if len(pairs) > 1 else ""
        console.note(Phase(f"{a.where} and {b.where}{which}"))
        alignments = {
            name: solve_pair(a, b, recipe, progress=console.note)
            for name, recipe in lines.recipes.items()
            if recipe
        }
        methods = [aligned_line(lines.folder, a, b)] if lines.folder else []
        methods += [line_method(name, a, b, alignments.get(name)) for name in lines.recipes]
        methods += [by_circuits(method, a) for method in methods] if lines.circuits else []
        ticks = len(task.batches) * points * len(methods)
        with console.progress(f"evaluating{which}", ticks) as tick:
            how = {"points": points, "device": device, "progress": tick}
            records.append(measure_lines(a, b, methods, task, **how))
        if target and len(pairs) == 1 and alignments:
            write_evidence([*alignments.values()][-1], target)
    record = records[0] if len(records) == 1 else combine_pairs(records)
    if target:
        write_curves(record, target)
        write_text(target / "curve.svg", drawing.curve_svg(record))
    return record


def _measure_together(
    target: Path | None,
    models: Sequence[Model],
    lines: _Lines,
    task: Task,
    points: int,
    device: str,
) -> SimplexFile:
    """Measure the simplex of all models by every method; written to the folder, if there is one."""
    methods = [aligned_simplex(lines.folder)] if lines.folder else []
    for name, recipe in lines.recipes.items():
        console.note(Phase(f"{len(models)} models, {name}"))
        methods.append(simplex_method(name, models, recipe, console.note))
    ticks = len(task.batches) * len(simplex_places(len(models), points)) * len(methods)
    with console.progress("evaluating", ticks) as tick:
        how = {"points": points, "device": device, "progress": tick}
        record = measure_methods(models, methods, task, **how)
    if target:
        write_simplex(record, target)
        for file, text in drawing.simplex_svgs(record).items():
            write_text(target / file, text)
    return record
