"""The verb kinship: are checkpoints related?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symmerge import report as drawing  # the package: imports matplotlib on first use
from symmerge.checkpoints.folders import new_folder
from symmerge.cli import console
from symmerge.cli.options.common import Json, Overwrite
from symmerge.cli.options.groups import verb
from symmerge.errors import MismatchError
from symmerge.lineage.examine import kinship as examine
from symmerge.lineage.fingerprints import add_to_index, search_index
from symmerge.lineage.merges import shares
from symmerge.lineage.results import IndexMatches, Kinship, MergeShares

REMEDY = "give a model and one or more candidates: symmerge kinship MODEL CANDIDATE [CANDIDATE ...]"


@verb(
    examples=(
        "seed-0 unknown",
        "merge base-1 base-2",
        "--index known --add seed-0",
    )
)
def kinship(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Two checkpoint folders; or a merge and its candidate parents, to get their"
            " shares.",
            metavar="A B ...",
            show_default=False,
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(
            help="A folder of fingerprints to compare one model with, 2 MB per model.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Add the fingerprints of the models to --index.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write kinship.json and a page with a picture of the layers to this folder. It"
            " appears whole or not at all.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Are two checkpoints related, in any disguise? Exit code 0 for yes, 1 for no.

    Use this to find out whether a model is a copy, a fine-tune or a merge of another. It needs no
    data and does not run the models. Any symmetry of the architecture is undone first.
    """
    folders = tuple(models or ())
    _check(folders, index, add=add, out=out)
    if index and add:
        for folder in folders:
            console.say(f"wrote {add_to_index(index, folder)}")
        return
    if index:
        evidence = search_index(index, folders[0])
        related = any(one.related for one in evidence.matches)
    elif len(folders) == 2:
        evidence = examine(*folders, progress=console.note)
        related = evidence.related
        if out:
            _write(evidence, out, folders, overwrite=overwrite)
    else:
        evidence = shares(folders[0], folders[1:], progress=console.note)
        related = any(one.related for one in evidence.parents)
    if json:
        console.show_json(evidence.to_json())
    else:
        _show(evidence)
    raise typer.Exit(0 if related else 1)


def _check(folders: tuple[Path, ...], index: Path | None, *, add: bool, out: Path | None) -> None:
    given = " and ".join(map(str, folders)) or "no model"
    if add and index is None:
        raise MismatchError("--add needs a folder of fingerprints: name it with --index FOLDER")
    if index and not (len(folders) == 1 or (add and folders)):
        raise MismatchError(f"{given}: --index compares one model; give one, or use --add")
    if index is None and len(folders) < 2:
        raise MismatchError(f"{given}: {REMEDY}")
    if out and (index or len(folders) != 2):
        raise MismatchError(
            f"--out {out}: only a comparison of two models has a page; leave it out"
        )


def _write(evidence: Kinship, out: Path, inputs: tuple[Path, ...], *, overwrite: bool) -> None:
    with new_folder(out, overwrite=overwrite, inputs=inputs) as folder:
        evidence.write(folder / "kinship.json")
        drawing.report(folder, folder / "page.html")


def _show(evidence: Kinship | MergeShares | IndexMatches) -> None:
    if isinstance(evidence, Kinship):
        for sentence in evidence.sentences:
            console.say(sentence)
        console.show_table("Layers", [layer.to_json() for layer in evidence.layers])
        console.show_table("Likeness", evidence.table())
    elif isinstance(evidence, MergeShares):
        console.say(f"{evidence.explained:.0%} of {evidence.model} is explained by the candidates")
        console.show_table("Shares", [one.to_json() for one in evidence.parents])
    else:
        console.show_table("Index", [one.to_json() for one in evidence.matches])
