"""Options that several verbs share: where they come from (the command line, a YAML file), and the solver they ask for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
import typer
import yaml

from symmerge import console
from symmerge.activations import Score
from symmerge.errors import MismatchError, SymmetryError
from symmerge.matching.heads import HeadOptions
from symmerge.matching.recipes import DATA_FREE, WITH_DATA, Recipe, read_counts, recipe, with_options
from symmerge.model import Model, device_of
from symmerge.statistics import Statistics
from symmerge.tasks import Task, make_task, task_of

METRICS, INSIDES = (get_args(get_type_hints(HeadOptions)[name]) for name in ("metric", "inside"))
SCORES, DTYPES = get_args(Score), ("float32", "float64")
METHODS = {"weights": "symmerge", "activations": "activations"}
"""What to look at, and the recipe that is ours for it."""


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
Method = Annotated[str | None, typer.Option(help=f"What to look at: {either(METHODS)}; weights need no data.", show_default="weights, or by recipe")]
RecipeName = Annotated[
    str | None,
    typer.Option(help=f"Which variant. Weights: {either(DATA_FREE)}. Activations: {either(WITH_DATA)}.", show_default="symmerge or activations, by method"),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Inputs on which activations are seen: self (text the models write), digits:train, python-docs:train, a file (text, .xz, TSV, CSV, JSONL,"
        " .npz), a folder of pictures, or hf:NAME. What models were trained on, never what a merge is measured on.",
        show_default=False,
    ),
]
Samples = Annotated[int | None, typer.Option(help="How many samples of --data to use.", show_default="by task")]
StatisticsFile = Annotated[
    Path | None, typer.Option("--statistics", help="What symmerge statistics wrote for this pair: no pass over data.", show_default=False)
]
ScoreName = Annotated[str | None, typer.Option("--score", help=f"How activations are compared: {either(SCORES)}.", show_default="by recipe")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run with the same options was.")]
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


# What a model of each task looks at, in words.
INPUTS = {
    "mlm": "a text file, python-docs:train or hf:NAME; or self, which needs no data: the models write the text",
    "clm": "a text file, python-docs:train or hf:NAME; or self, which needs no data: the models write the text",
    "image": "digits:train, an .npz file, a folder with a subfolder of pictures per class, or hf:NAME",
    "text": "a TSV, CSV or JSONL file with the columns label and text, or hf:NAME",
}


def chosen_recipe(method: str | None = None, name: str | None = None, *, loose: bool = False) -> Recipe:
    """The recipe that two options ask for. One that is no symmetry is refused unless it is only to be measured (`loose`)."""
    if method is not None:
        choice("--method", method, METHODS)
    chosen = recipe(name or METHODS[method or "weights"])
    needed = "activations" if chosen.needs_data else "weights"
    if method not in (None, needed):
        fitting = DATA_FREE if method == "weights" else WITH_DATA
        raise MismatchError(f"--recipe {name} looks at {needed}, not at {method}: leave out --method, or choose one of {', '.join(fitting)}")
    if chosen.loose and not loose:
        raise SymmetryError(f"recipe {name} is no symmetry: what it gives is another function than the model's; measure it with barrier")
    return chosen


def inputs(models: Sequence[Model], data: str, *, samples: int | None = None, seed: int = 0) -> Task:
    """What models of one kind look at: their own task on some data."""
    return make_task(task_of(models[0]), data, models, samples=samples, seed=seed)


def solver(
    models: Sequence[Model],
    method: str | None = None,
    name: str | None = None,
    *,
    data: str | None = None,
    samples: int | None = None,
    statistics: Path | None = None,
    score: str | None = None,
    partial: Path | None = None,
    metric: str | None = None,
    inside: str | None = None,
    tries: int | None = None,
    sweeps: int | None = None,
    token_counts: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
) -> Recipe:
    """What align and merge solve with, from their options; wrong ones are refused before any work."""
    chosen = chosen_recipe(method, name)
    for option, given, known in (("--dtype", dtype, DTYPES), ("--metric", metric, METRICS), ("--inside", inside, INSIDES), ("--score", score, SCORES)):
        if given is not None:
            choice(option, given, known)
    device_of(device)
    counts = read_counts(token_counts) if token_counts else None
    kind = getattr(torch, dtype)
    chosen = with_options(chosen, metric=metric, inside=inside, tries=tries, max_sweeps=sweeps, token_counts=counts, seed=seed, device=device, dtype=kind)
    for option, given in (("--data", data), ("--samples", samples), ("--statistics", statistics), ("--score", score)):
        if given is not None and not chosen.needs_data:
            raise MismatchError(f"{option} {given}: weights are matched without data; add --method activations")
    if not chosen.needs_data:
        return chosen
    if data is None and (statistics is None or samples is not None):
        raise MismatchError(f"activations need something to look at: give --data: {INPUTS[task_of(models[0])]}")
    made = inputs(models, data, samples=samples, seed=seed) if data else None
    return with_options(chosen, data=made, statistics=Statistics.load(statistics) if statistics else None, score=score, partial=partial)
