"""The verb train: train a stock model by a recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
import yaml

from symmerge.aligning.choices import check_choice
from symmerge.cli import console
from symmerge.cli.options.common import Json, Overwrite, Resume, Seed
from symmerge.cli.options.groups import verb
from symmerge.errors import MismatchError
from symmerge.lab.training import recipes
from symmerge.lab.training.loop import train as run_training
from symmerge.lab.training.recipes import Schedule, training_recipe, with_changes
from symmerge.lab.training.reinitialization import COMPONENTS

FLOATS = ("lr", "decay", "clip")  # YAML reads 1e-3 as a string


@dataclass(frozen=True)
class Beginning:
    """Starting point and data of training."""

    panel: ClassVar[str] = "Starting from a trained model"
    main: ClassVar[tuple[str, ...]] = ("data_dir", "device", "resume")
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder with the data sets for the papers' recipes; an error names missing"
            " ones.",
            envvar="SYMMERGE_DATA",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            help="Where to train: cpu (the same weights every time) or cuda (bfloat16, compiled)."
        ),
    ] = "cpu"
    begin: Annotated[
        Path | None,
        typer.Option(
            help="A trained model to start from: classifiers need one; others continue training.",
            show_default=False,
        ),
    ] = None
    fresh: Annotated[
        str | None,
        typer.Option(
            help="With --begin: the part that the seed initialises afresh"
            f" ({', '.join(COMPONENTS)}).",
            show_default=False,
        ),
    ] = None
    only_fresh: Annotated[bool, typer.Option("--only-fresh", help="Train only that part.")] = False
    head_seed: Annotated[
        int,
        typer.Option(help="Seed of a classifier's new head: the same for models to be merged."),
    ] = 0
    resume: Resume = False


@verb(
    "interrupted: no model was written; the state of the last minute is saved next to --out,"
    " --resume continues from it",
    examples=(
        "--list",
        "RECIPE --seed 1 --out seed-1",
        "RECIPE --begin seed-1 --fresh attention --seed 2 --out other",
    ),
)
def train(
    beginning: Beginning,
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="What to train; --list shows them all.", metavar="RECIPE", show_default=False
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
        bool, typer.Option("--list", help="List the recipes and how long each takes.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="Train for this many steps instead; warm-up scales with them.", min=1),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="Change a size or setting of the recipe; may be repeated:"
            " --change n_embd=96 --change lr=1e-3.",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Train a stock model: a small one in seconds on bundled data, or the papers' models.

    Use this for experiments with merging: another seed gives different weights of the same
    quality. The last example re-initialises only the attention of a trained model.
    """
    if listed:
        _list(json)
        return
    if recipe is None or out is None:
        missing = "no recipe" if recipe is None else "no --out"
        raise MismatchError(f"{missing}: symmerge train RECIPE --out DIR; --list shows the recipes")
    check_choice("--fresh", beginning.fresh, COMPONENTS)
    chosen = _with_changes(recipe, steps, change or [])
    with console.progress(f"training {recipe}, seed {seed}", chosen.schedule.steps) as tick:
        how = {**vars(beginning), "overwrite": overwrite}
        run_training(chosen, seed, out, tick, data=how.pop("data_dir"), **how)
    console.say(
        f"wrote {out}: {chosen.about}; metrics.json has the loss of every step and the result on"
        " held-out data"
    )


def _with_changes(name: str, steps: int | None, changes: list[str]) -> Any:
    """The recipe with the changes of the command line."""
    known = {field.name for field in fields(Schedule)}
    schedule: dict[str, object] = {"steps": steps} if steps else {}
    sizes: dict[str, object] = {}
    for change in changes:
        setting, equals, value = change.partition("=")
        if not equals:
            raise MismatchError(f"--change {change}: write NAME=VALUE, such as n_layer=4")
        number = float(value) if setting in FLOATS else yaml.safe_load(value)
        (schedule if setting in known else sizes)[setting] = number
    recipe = training_recipe(name)
    return with_changes(recipe, config=sizes, schedule=schedule) if schedule or sizes else recipe


def _list(json: bool) -> None:
    rows = [
        {"recipe": name, "takes": one.duration, "data": one.data, "what it is": one.about}
        for name, one in recipes.TRAINING.items()
    ]
    console.show_json(rows) if json else console.show_table("What symmerge trains", rows)
