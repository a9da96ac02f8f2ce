"""Verbs that measure: barrier and report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from symmerge import report as drawing  # the module: matplotlib is loaded when something is drawn
from symmerge.aligning.pair import Aligned, write_evidence
from symmerge.aligning.pair import align as solve
from symmerge.checkpoints.files import write_text
from symmerge.checkpoints.folders import new_folder
from symmerge.cli import console, simplex
from symmerge.cli.options import (
    INPUTS,
    METHODS,
    Config,
    Device,
    Json,
    Models,
    Out,
    Overwrite,
    Seed,
    Steps,
    chosen_recipe,
    different,
    inputs,
)
from symmerge.errors import MismatchError
from symmerge.evaluation.lines import (
    LineMethod,
    combine_pairs,
    even_steps,
    measure_lines,
    write_curves,
)
from symmerge.evaluation.results import CurveFile, CurvesFile, SimplexFile
from symmerge.evaluation.simplices import POINTS as TOGETHER_POINTS
from symmerge.evaluation.tasks import SELF_SOURCES, Task, make_task, task_of
from symmerge.matching.recipes import RECIPES, Recipe, with_options
from symmerge.models.model import Model, device_of, load
from symmerge.models.tables import check_same_table

POINTS = 21


def barrier(
    out: Out,
    task: Annotated[
        str, typer.Option(help="What to measure: mlm, clm, image or text.", show_default=False)
    ],
    data: Annotated[
        str,
        typer.Option(
            help="self, digits, python-docs, python-topics, a file (text, .xz, TSV, CSV, JSONL, .npz), a folder of pictures, or hf:NAME.",
            show_default=False,
        ),
    ],
    models: Models = None,
    method: Annotated[
        str,
        typer.Option(
            help=f"Lines to compare, with commas: none, {', '.join(METHODS)}, or a recipe of align; learned:residual+ff learns these alone."
        ),
    ] = "none,weights",
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Inputs for methods that look at some or learn from some, as --data of align; never --data.",
            show_default=False,
        ),
    ] = None,
    calibration_samples: Annotated[
        int | None,
        typer.Option(help="How many samples of --calibration to use.", show_default="by task"),
    ] = None,
    steps: Steps = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Of three models or more: bring all together instead of every pair; every line, the triangle, all merged.",
        ),
    ] = False,
    points: Annotated[
        int | None,
        typer.Option(
            help="Points on a line, both ends included.",
            show_default=f"{POINTS}, or {TOGETHER_POINTS} with --together",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="How many samples to use.", show_default="by task")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Measure the loss along the straight line from A to B: every method, both barriers, and the parents' ensemble.

    Of three models or more every pair is aligned and measured: means and standard errors over the pairs.

    With --together all are brought to common coordinates at once: barriers of every pair there, of more and more models merged, and the triangle of the first three.

    Writes curve.json, curve.csv and curve.svg, or simplex.json, simplex.csv and figures. Example: [bold]symmerge barrier ./seed-0 ./seed-1 --task clm --data python-docs --out ./curve[/]
    """
    with console.friendly():
        points = (TOGETHER_POINTS if together else POINTS) if points is None else points
        even_steps(points)
        folders = different(
            models, "a line has two ends; give two models or more, symmerge barrier A B"
        )
        device_of(device)
        opened = [load(folder) for folder in folders]
        made = make_task(
            task, data, opened, samples=samples, seed=seed, device=device
        )  # bad data is refused before anything is solved
        made.check_labels()
        solvers = {
            name.strip(): _line_solver(name.strip(), seed, device, steps)
            for name in method.split(",")
        }
        if steps and not any(_learns(recipe) for recipe in solvers.values()):
            raise MismatchError(
                f"--steps {steps}: none of {', '.join(solvers)} learns; leave it out, or add learned to --method"
            )
        if together:
            simplex.check(folders, solvers)
        solvers = _with_inputs(
            solvers, opened, data, calibration, calibration_samples, seed, device
        )
        if None in solvers.values():
            check_same_table(opened, "joined by a line")
        with new_folder(out, overwrite=overwrite, inputs=folders) as folder:
            if together:
                record = simplex.measure(folder, opened, solvers, made, points, device)
            else:
                record = _measure(
                    folder, list(combinations(opened, 2)), solvers, made, points, device
                )
        if json:
            console.show_json(record.to_json())
            return
        over = (
            f", {len(opened)} models together"
            if together
            else f", {len(record.pairs)} pairs"
            if isinstance(record, CurvesFile)
            else ""
        )
        rows = simplex.rows(record) if isinstance(record, SimplexFile) else _rows(record)
        console.show_table(
            f"Barriers: {task} on {data}, {made.samples} samples, {points} points{over}; wrote {out}",
            rows,
        )


def _line_solver(name: str, seed: int, device: str, steps: int | None) -> Recipe | None:
    """What brings the ends of a line together: a method of align, or one of its recipes; nothing for a plain average."""
    if name == "none":
        return None
    name, _, spaces = name.partition(":")
    chosen = (
        chosen_recipe(name, non_symmetric=True)
        if name in METHODS and name not in RECIPES
        else chosen_recipe(name=name, non_symmetric=True)
    )
    learning: dict[str, Any] = (
        {"steps": steps, "spaces": tuple(spaces.split("+")) if spaces else None}
        if _learns(chosen)
        else {}
    )
    if spaces and not learning:
        raise MismatchError(
            f"{name}:{spaces}: only learned methods take spaces to learn; leave out :{spaces}"
        )
    return with_options(chosen, seed=seed, device=device, **learning)


def _learns(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.method in ("learned", "soft")


def _with_inputs(
    solvers: Mapping[str, Recipe | None],
    models: Sequence[Model],
    data: str,
    calibration: str | None,
    samples: int | None,
    seed: int,
    device: str,
) -> dict[str, Recipe | None]:
    """Those that look at inputs or learn from them get some: others than the loss is measured on."""
    looking = {name: recipe for name, recipe in solvers.items() if recipe and recipe.needs_data}
    if not looking:
        if calibration or samples:
            raise MismatchError(
                f"--calibration: none of {', '.join(solvers)} looks at activations; leave it out, or add one that does to --method"
            )
        return dict(solvers)
    if (
        calibration is None
        and all(map(_learns, looking.values()))
        and task_of(models[0]) in SELF_SOURCES
    ):
        calibration = "self"
    if calibration is None:
        raise MismatchError(
            f"{', '.join(looking)}: activations need something to look at: give --calibration: {INPUTS[task_of(models[0])]}"
        )
    if calibration != "self" and Path(calibration).resolve() == Path(data).resolve():
        raise MismatchError(
            f"--calibration {calibration} is what is measured on: a merge fitted to it would look better than it is; give other data"
        )
    # Text that models write twice is the same for the same seed: the other seed makes it other text.
    made = {
        learned: inputs(
            models,
            calibration,
            samples=samples,
            learned=learned,
            seed=seed + (calibration == data),
            device=device,
        )
        for learned in {_learns(recipe) for recipe in looking.values()}
    }
    return {
        **solvers,
        **{
            name: with_options(recipe, data=made[_learns(recipe)])
            for name, recipe in looking.items()
        },
    }


def _measure(
    folder: Path,
    pairs: Sequence[tuple[Model, Model]],
    solvers: Mapping[str, Recipe | None],
    task: Task,
    points: int,
    device: str,
) -> CurveFile | CurvesFile:
    """The lines of every pair, and all that is written about them."""
    records = []
    for number, pair in enumerate(pairs, 1):
        which = f", pair {number} of {len(pairs)}" if len(pairs) > 1 else ""
        console.note(f"{pair[0].where} and {pair[1].where}{which}")
        found = {
            name: solve(*pair, recipe, progress=console.note)
            for name, recipe in solvers.items()
            if recipe
        }
        methods = [_line(name, *pair, found.get(name)) for name in solvers]
        with console.progress(
            f"evaluating{which}", len(task.batches) * points * len(methods)
        ) as tick:
            records.append(
                measure_lines(*pair, methods, task, points=points, device=device, progress=tick)
            )
        if len(pairs) == 1 and found:
            write_evidence([*found.values()][-1], folder)
    record = records[0] if len(records) == 1 else combine_pairs(records)
    write_curves(record, folder)
    write_text(folder / "curve.svg", drawing.curve_svg(record))
    return record


def _line(name: str, a: Model, b: Model, found: Aligned | None) -> LineMethod:
    if found is None:
        return LineMethod(name, simplex.PLAIN, a, b)
    return LineMethod(
        name,
        simplex.label(name, found.recipe),
        found.reference,
        found.aligned,
        found.solution.settings,
        found.solution.objective,
        exact=not found.recipe.non_symmetric,
    )


def _rows(record: CurveFile | CurvesFile) -> Iterator[dict[str, Any]]:
    """Both barriers of every method; of several pairs their means and standard errors."""
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


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A folder from barrier or align, or one with such subfolders.",
            metavar="DIR",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="The page to write: one HTML file that needs nothing else.",
            show_default=False,
        ),
    ],
    config: Config = None,
) -> None:
    """Make one self-contained page of results: curves with a slider, tables that sort, how it was measured.

    Computes nothing again. Example: [bold]symmerge report ./results --out page.html[/]
    """
    with console.friendly():
        console.out.print(f"wrote {drawing.report(folder, out)}", soft_wrap=True)
