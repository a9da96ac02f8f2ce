"""Verbs that make models: train and demo."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from symmerge.cli import console
from symmerge.cli.options import Config, Json, Overwrite, Resume, Seed, choice
from symmerge.errors import MismatchError
from symmerge.lab.demonstration import demo as show
from symmerge.lab.demonstration import family_rows
from symmerge.lab.small_models import SMALL
from symmerge.lab.training.loop import train as fit
from symmerge.lab.training.recipes import TRAINING, Schedule, training_recipe, with_changes
from symmerge.lab.training.reinitialization import COMPONENTS


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="What to train; --list shows all.", metavar="RECIPE", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The folder to write. It appears whole or not at all.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    listed: Annotated[
        bool, typer.Option("--list", help="Show every recipe, and how long it takes.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The folder with the data sets of the papers' recipes; what is missing there is named.",
            envvar="SYMMERGE_DATA",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Where to train: cpu (the same weights every time) or cuda (bfloat16, compiled)."
        ),
    ] = "cpu",
    steps: Annotated[
        int | None,
        typer.Option(
            help="Train so many steps instead; the warm-up is shortened or lengthened with them.",
            min=1,
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="A size or setting of the recipe, often if need be: --change n_embd=96 --change lr=1e-3.",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option(
            help="A trained model to go on from: classifiers need one; others are trained on.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        str | None,
        typer.Option(
            help=f"With --begin: the part that is initialised anew by the seed ({', '.join(COMPONENTS)}).",
            show_default=False,
        ),
    ] = None,
    only_fresh: Annotated[
        bool, typer.Option("--only-fresh", help="Train nothing but that part.")
    ] = False,
    head_seed: Annotated[
        int,
        typer.Option(
            help="Of a classifier's new head: models that are to be merged have the same."
        ),
    ] = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Train a stock model: small ones in seconds on data that comes with the installation, or the papers' on data sets in a folder.

    Another seed gives other weights of the same quality. Example: [bold]symmerge train RECIPE --seed 1 --out ./seed-1[/]

    A trained model whose attention alone begins anew: [bold]symmerge train RECIPE --begin ./seed-1 --fresh attention --seed 2 --out ./attention-2[/]
    """
    with console.friendly(
        "interrupted: no model was written; what was kept in the last minute is beside --out, and --resume goes on from it"
    ):
        if listed:
            _list(json)
            return
        if recipe is None or out is None:
            raise MismatchError(
                f"{'no recipe' if recipe is None else 'no --out'}: symmerge train RECIPE --out DIR; --list shows the recipes"
            )
        if fresh is not None:
            choice("--fresh", fresh, COMPONENTS)
        chosen = _chosen(recipe, steps, change or [])
        how = {
            "data": data,
            "device": device,
            "begin": begin,
            "fresh": fresh,
            "only_fresh": only_fresh,
            "head_seed": head_seed,
            "resume": resume,
        }
        with console.progress(f"training {recipe}, seed {seed}", chosen.schedule.steps) as tick:
            fit(chosen, seed, out, tick, overwrite=overwrite, **how)  # type: ignore[arg-type]
        console.out.print(
            f"wrote {out}: {chosen.about}; the loss of every step and the result on held-out data are in metrics.json",
            soft_wrap=True,
        )


def _chosen(name: str, steps: int | None, changes: list[str]) -> Any:
    """The recipe with what the command line changes."""
    known = {field.name for field in fields(Schedule)}
    schedule: dict[str, Any] = {"steps": steps} if steps else {}
    sizes: dict[str, Any] = {}
    for change in changes:
        setting, equals, value = change.partition("=")
        if not equals:
            raise MismatchError(f"--change {change}: write NAME=VALUE, such as n_layer=4")
        number = (
            float(value) if setting in ("lr", "decay", "clip") else yaml.safe_load(value)
        )  # YAML takes 1e-3 for a word
        (schedule if setting in known else sizes)[setting] = number
    recipe = training_recipe(name)
    return with_changes(recipe, config=sizes, schedule=schedule) if schedule or sizes else recipe


def _list(json: bool) -> None:
    found = [
        {"recipe": name, "takes": one.duration, "data": one.data, "what it is": one.about}
        for name, one in TRAINING.items()
    ]
    console.show_json(found) if json else console.show_table("What symmerge trains", found)


def demo(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Where everything goes; trained models are kept there."),
    ] = Path("out/demo"),
    seed: Seed = 0,
    symmetries: Annotated[
        bool,
        typer.Option(
            "--symmetries", help="Instead: move a small model of every family by a random symmetry."
        ),
    ] = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Train two pairs of small models, average them, align them by every method, and show the barriers on one page.

    A second run does not train again. Example: [bold]symmerge demo --out ./demo[/]
    """
    with console.friendly(
        "interrupted: models that were trained are kept, the rest was not written"
    ):
        if symmetries:
            _symmetries(seed, json)
        outcome = show(out, seed, bar=console.progress)
        if json:
            console.show_json(list(outcome.rows))
            return
        console.show_table(
            "Loss barriers on held-out data: averaging, and what alignment leaves of it",
            outcome.rows,
        )
        console.out.print(f"the page: {outcome.page}", soft_wrap=True)
        for folder in outcome.merged:
            console.out.print(f"merged, a stock checkpoint: {folder}", soft_wrap=True)


def _symmetries(seed: int, json: bool) -> None:
    found = []
    with console.progress("moving models", len(SMALL)) as tick:
        for row in family_rows(seed):
            found.append(row)
            tick(row["model"])
    if json:
        console.show_json(found)
    else:
        console.show_table(
            "A random element of the whole symmetry group: the weights move, the function does not",
            found,
        )
    raise typer.Exit(0 if all(row["same function"] == "yes" for row in found) else 1)
