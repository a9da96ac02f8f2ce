"""Verbs that measure: barrier and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symmerge import console
from symmerge.align import align as solve
from symmerge.barrier import Method, line, run, write
from symmerge.checkpoint import new_folder
from symmerge.cli.options import METHODS, Config, Device, Json, ModelA, ModelB, Out, Overwrite, Seed, solver
from symmerge.matching.recipes import Recipe
from symmerge.model import Model, load
from symmerge.tasks import make_task


def barrier(
    a: ModelA,
    b: ModelB,
    out: Out,
    task: Annotated[str, typer.Option(help="What to measure: mlm, clm, image or text.", show_default=False)],
    data: Annotated[
        str,
        typer.Option(help="self, digits, python-docs, a file (text, .xz, TSV, CSV, JSONL, .npz), a folder of pictures, or hf:NAME.", show_default=False),
    ],
    method: Annotated[str, typer.Option(help="Lines to compare, with commas: none, weights, or a recipe of align.")] = "none,weights",
    points: Annotated[int, typer.Option(help="Points on the line, both ends included.")] = 21,
    samples: Annotated[int | None, typer.Option(help="How many samples to use.", show_default="by task")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Measure the loss along the straight line from A to B: every method, both barriers, and the parents' ensemble.

    Writes curve.json, curve.csv and curve.svg. Example: [bold]symmerge barrier ./seed-0 ./seed-1 --task clm --data python-docs --out ./curve[/]
    """
    with console.friendly():
        from symmerge.report import curve_svg  # matplotlib is slow to import

        line(points)
        models = load(a), load(b)
        made = make_task(task, data, models, samples=samples, seed=seed)  # bad data is refused before anything is solved
        chosen = {name.strip(): _line_solver(name.strip(), seed, device) for name in method.split(",")}
        with new_folder(out, overwrite=overwrite, inputs=(a, b)) as folder:
            methods = [_line(name, *models, recipe) for name, recipe in chosen.items()]
            with console.progress("evaluating", len(made.batches) * points * len(methods)) as tick:
                record = run(*models, methods, made, points=points, device=device, progress=tick)
            write(record, folder)
            (folder / "curve.svg").write_text(curve_svg(record), "utf-8")
        if json:
            console.show_json(record)
            return
        rows = [{"method": m["label"], "barrier over the mean": m["barrier_mean"], "barrier over the line": m["barrier_linear"]} for m in record["methods"]]
        console.show_table(f"Barriers: {task} on {data}, {made.samples} samples, {points} points; wrote {out}", rows)


def _line_solver(name: str, seed: int, device: str) -> Recipe | None:
    """What brings the ends of a line together: a method of align, or one of its recipes; nothing for a plain average."""
    if name == "none":
        return None
    return solver(name, seed=seed, device=device) if name in METHODS else solver(name=name, seed=seed, device=device)


def _line(name: str, a: Model, b: Model, recipe: Recipe | None) -> Method:
    if recipe is None:
        return Method(name, "plain average", a, b)
    found = solve(a, b, recipe, report=console.note)
    label = "weight matching" if name == "weights" else f"weight matching, {name}"
    return Method(name, label, found.reference, found.aligned, found.solution.settings, found.solution.objective)


def report(
    folder: Annotated[
        Path, typer.Argument(help="A folder with curve.json (from barrier), or with subfolders that have one.", metavar="DIR", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write: one HTML file that needs nothing else.", show_default=False)],
    config: Config = None,
) -> None:
    """Make one self-contained page of results: curves with a slider, tables that sort, how it was measured.

    Computes nothing again. Example: [bold]symmerge report ./results --out page.html[/]
    """
    with console.friendly():
        from symmerge.report import report as make_page  # matplotlib is slow to import

        console.out.print(f"wrote {make_page(folder, out)}", soft_wrap=True)
