"""Options that several verbs share: where they come from (the command line, a YAML file), and the solver they ask for."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
import typer
import yaml

from symmerge import console
from symmerge.errors import MismatchError
from symmerge.matching.heads import HeadOptions
from symmerge.matching.recipes import RECIPES, Recipe, read_counts, recipe, with_options
from symmerge.model import device_of

METRICS, INSIDES = (get_args(get_type_hints(HeadOptions)[name]) for name in ("metric", "inside"))
METHODS, DTYPES = ("weights",), ("float32", "float64")


def either(names: Collection[str]) -> str:
    """A choice in words.

    >>> either(["a", "b", "c"])
    'a, b or c'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def choice(option: str, given: str, known: Collection[str]) -> None:
    """Refuse what is not among the choices of an option."""
    if given not in known:
        raise MismatchError(f"{option} {given}: choose {either(known)}")


def _configure(context: Any, file: Path | None) -> Path | None:
    """Options from a YAML file become the defaults; unknown ones are refused."""
    # Any, because typer passes a context of its own that is no typer.Context.
    if file is None:
        return None
    known = {parameter.name for parameter in context.command.params if parameter.name} - {"config"}
    with console.friendly():
        options = _read_options(file)
        if unknown := sorted(options.keys() - known):
            raise MismatchError(f"{file}: unknown option {', '.join(unknown)}; {context.info_name} knows {', '.join(sorted(known))}")
    context.default_map = {**(context.default_map or {}), **options}
    return file


def _read_options(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MismatchError(f"{file} cannot be read as YAML ({error}): write one option per line, 'seed: 1'") from error
    if not isinstance(content, dict):
        raise MismatchError(f"{file} holds no options: write one per line, 'seed: 1'")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


# models and folders
ModelPath = Annotated[Path, typer.Argument(help="A Hugging Face checkpoint folder.", metavar="MODEL", show_default=False)]
ModelA = Annotated[Path, typer.Argument(help="A checkpoint folder.", metavar="A", show_default=False)]
ModelB = Annotated[Path, typer.Argument(help="Another, of the same architecture and size.", metavar="B", show_default=False)]
Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write. It appears whole or not at all.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")]
ShardSize = Annotated[float, typer.Option("--max-shard-size", help="The largest weights file, in GB.", min=0.000001)]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Skip the check that the function did not change; the card will say so.")]
Residual = Annotated[str, typer.Option(help="How the stream may move: full, permutation (keeps a tied head tied) or identity.")]

# how to find the symmetry
Method = Annotated[str, typer.Option(help="How to find the symmetry: weights (data-free).")]
RecipeName = Annotated[str, typer.Option(help=f"Which variant: {either(RECIPES)}.")]
Metric = Annotated[str | None, typer.Option(help=f"How heads are compared: {either(METRICS)}.", show_default="by recipe")]
Inside = Annotated[str | None, typer.Option(help=f"How the basis inside heads is found: {either(INSIDES)}.", show_default="by recipe")]
Tries = Annotated[int | None, typer.Option(help="How many weightings to try at most.", min=1, show_default="by size")]
SweepsMost = Annotated[int | None, typer.Option("--sweeps", help="How many sweeps at most.", min=1, show_default="by recipe")]
TokenCounts = Annotated[
    Path | None, typer.Option(help="How often each token occurred in training, as .npy: those that never did are left out.", show_default=False)
]
SolveType = Annotated[str, typer.Option("--dtype", help=f"The precision to solve in: {either(DTYPES)}.")]
Device = Annotated[str, typer.Option(help="Where to solve: cpu or cuda.")]

# every verb
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="A YAML file with any of these options.", callback=_configure, is_eager=True, show_default=False),
]


def solver(
    method: str = "weights",
    name: str = "symmerge",
    *,
    metric: str | None = None,
    inside: str | None = None,
    tries: int | None = None,
    sweeps: int | None = None,
    token_counts: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
) -> Recipe:
    """What align, merge and barrier solve with, from their options; wrong ones are refused before any work."""
    for option, given, known in (("--method", method, METHODS), ("--dtype", dtype, DTYPES), ("--metric", metric, METRICS), ("--inside", inside, INSIDES)):
        if given is not None:
            choice(option, given, known)
    device_of(device)
    counts = read_counts(token_counts) if token_counts else None
    kind = getattr(torch, dtype)
    return with_options(recipe(name), metric=metric, inside=inside, tries=tries, max_sweeps=sweeps, token_counts=counts, seed=seed, device=device, dtype=kind)
