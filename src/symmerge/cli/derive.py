"""The verb derive: propose a table for an architecture, with its proof."""

from pathlib import Path
from typing import Annotated

import typer

from symmerge.checkpoints.files import write_text
from symmerge.cli import console
from symmerge.cli.options.common import Json, Seed
from symmerge.cli.options.groups import verb
from symmerge.derivation.results import results_of, text_of
from symmerge.derivation.stock import derive_stock
from symmerge.errors import MismatchError


@verb(
    examples=(
        "model --out table.txt",
        "org/model-on-the-hub --json",
        "NameOfAClass",
    )
)
def derive(
    model: Annotated[
        str,
        typer.Argument(
            help="The name of a transformers class, a checkpoint folder, or a hub name.",
            metavar="MODEL_OR_CLASS",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the table to this file: .json, or else text.", metavar="FILE"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Propose a symmetry table for an architecture, and prove every space in it.

    Use this for architectures that symmerge has no table for. A small module of the class is
    traced; random elements of every space are shown to change nothing, and those of larger groups
    to change the outputs. For your own modules, use sm.derive in Python.
    """
    if out and out.exists() and not overwrite:
        raise MismatchError(f"{out} exists: choose another name, or add --overwrite")
    derivation = derive_stock(model, seed=seed)
    if out and out.suffix == ".json":
        results_of(derivation).write(out)
    elif out:
        write_text(out, text_of(derivation))
    if json:
        console.show_json(results_of(derivation).to_json())
    else:
        console.say(text_of(derivation).rstrip())
