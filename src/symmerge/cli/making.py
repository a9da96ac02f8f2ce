"""Verbs that make models: train and demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symmerge import console
from symmerge.cli.options import Config, Json, Out, Overwrite, Seed
from symmerge.demo import demo as show
from symmerge.demo import rows
from symmerge.zoo.recipes import training_recipe
from symmerge.zoo.small import SMALL
from symmerge.zoo.train import train as fit


def train(
    recipe: Annotated[str, typer.Argument(help="What to train; an unknown name lists those there are.", metavar="RECIPE", show_default=False)],
    out: Out,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    config: Config = None,
) -> None:
    """Train a small stock model on data that comes with the installation. Another seed gives other weights of the same quality.

    Pictures of digits, or the documentation of Python's standard library. Example: [bold]symmerge train RECIPE --seed 1 --out ./seed-1[/]
    """
    with console.friendly():
        chosen = training_recipe(recipe)
        with console.progress(f"training {recipe}, seed {seed}", chosen.schedule.steps) as tick:
            fit(chosen, seed, out, tick, overwrite=overwrite)
        console.out.print(f"wrote {out}: {chosen.about}; the loss of every step is in metrics.json", soft_wrap=True)


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where everything goes; trained models are kept there.")] = Path("out/demo"),
    seed: Seed = 0,
    symmetries: Annotated[bool, typer.Option("--symmetries", help="Instead: move a small model of every family by a random symmetry.")] = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Train two pairs of small models, average them, align them by every method, and show the barriers on one page.

    A second run does not train again. Example: [bold]symmerge demo --out ./demo[/]
    """
    with console.friendly("interrupted: models that were trained are kept, the rest was not written"):
        if symmetries:
            _symmetries(seed, json)
        outcome = show(out, seed, bar=console.progress)
        if json:
            console.show_json(list(outcome.rows))
            return
        console.show_table("Loss barriers on held-out data: averaging, and what alignment leaves of it", outcome.rows)
        console.out.print(f"the page: {outcome.page}", soft_wrap=True)
        for folder in outcome.merged:
            console.out.print(f"merged, a stock checkpoint: {folder}", soft_wrap=True)


def _symmetries(seed: int, json: bool) -> None:
    found = []
    with console.progress("moving models", len(SMALL)) as tick:
        for row in rows(seed):
            found.append(row)
            tick(row["model"])
    if json:
        console.show_json(found)
    else:
        console.show_table("A random element of the whole symmetry group: the weights move, the function does not", found)
    raise typer.Exit(0 if all(row["same function"] == "yes" for row in found) else 1)
