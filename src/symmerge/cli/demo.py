"""The verb demo: train, align and merge small models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symmerge.cli import console
from symmerge.cli.options.common import Json, Seed
from symmerge.cli.options.groups import verb
from symmerge.cli.verdicts import show_verdict
from symmerge.lab.demonstration import demo as run_demo
from symmerge.lab.demonstration import family_rows
from symmerge.lab.small_models import SMALL


@verb(
    "interrupted: trained models are kept, the rest was not written",
    examples=(
        "--out demo",
        "--out demo --seed 1",
        "--symmetries",
    ),
)
def demo(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Output folder; trained models are kept there.",
            metavar="DIR",
        ),
    ] = Path("out/demo"),
    seed: Seed = 0,
    symmetries: Annotated[
        bool,
        typer.Option(
            "--symmetries", help="Instead, move a small model of every family by a random symmetry."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Train two pairs of small models, align and merge them by every method, on one page.

    See what symmerge does without any models or data of your own. A second run does not train
    again.
    """
    if symmetries:
        _symmetries(seed, json)
    outcome = run_demo(out, seed, bar=console.progress)
    if json:
        console.show_json(list(outcome.rows))
        return
    title = "Loss barriers on held-out data: plain averaging, and after alignment"
    console.show_table(title, outcome.rows)
    console.say(f"page: {outcome.page}")
    for folder, verdict in outcome.merged.items():
        console.say(f"merged into a stock checkpoint: {folder}")
        show_verdict(verdict)


def _symmetries(seed: int, json: bool) -> None:
    rows = []
    with console.progress("moving models", len(SMALL)) as tick:
        for row in family_rows(seed):
            rows.append(row)
            tick(row["model"])
    if json:
        console.show_json(rows)
    else:
        title = "A random element of the whole symmetry group: new weights, the same function"
        console.show_table(title, rows)
    raise typer.Exit(0 if all(row["same function"] == "yes" for row in rows) else 1)
