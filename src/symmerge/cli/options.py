"""Options that several verbs share: where they come from (the command line, a YAML file), and the solver they ask for."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
import typer
import yaml

from symmerge.cli import console
from symmerge.distributed import local_device
from symmerge.errors import MismatchError, SymmergeWarning, SymmetryError
from symmerge.evaluation.tasks import SELF_SOURCES, Task, make_task, task_of
from symmerge.matching.evidence import read_token_counts
from symmerge.matching.heads import HeadOptions
from symmerge.matching.learned import PARTS, LearnedMatching, most_inputs
from symmerge.matching.learning.distillation import Target
from symmerge.matching.learning.samplers import HELP as SAMPLERS
from symmerge.matching.recipes import BY_METHOD, Recipe, get_recipe, with_options
from symmerge.matching.universes import MEDOID
from symmerge.matching.weights import WeightMatching
from symmerge.models.model import Model, device_of, load
from symmerge.models.widening import Units as UnitKind
from symmerge.models.widening import widen
from symmerge.observation.activations import Score
from symmerge.observation.statistics import Statistics

METRICS, INSIDES = (get_args(get_type_hints(HeadOptions)[name]) for name in ("metric", "inside"))
SCORES, DTYPES = get_args(Score), ("float32", "float64")
METHODS = {
    "weights": "symmerge",
    "activations": "activations",
    "learned": "learned",
    "soft": "soft-hardened",
}
"""What to look at or how to learn, and the recipe that is ours for it."""
STARTS = ("weights", "activations", "identity")
TARGETS = get_args(Target)
UNITS = get_args(UnitKind)


def either(names: Collection[str]) -> str:
    """A choice in words.

    >>> either(["a", "b", "c"])
    'a, b or c'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def families(names: Iterable[str]) -> str:
    """Names in few words: those that begin alike are written once.

    >>> families(["a", "b", "b-c", "b-d"])
    'a, b, -c, -d'
    """
    found, last = [], None
    for name in names:
        head, dash, rest = name.partition("-")
        found.append(dash + rest if head == last else name)
        last = head
    return ", ".join(found)


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
            raise MismatchError(
                f"{file}: unknown option {', '.join(unknown)}; {context.info_name} knows {', '.join(sorted(known))}"
            )
    context.default_map = {**(context.default_map or {}), **options}
    return file


def _read_options(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MismatchError(
            f"{file} cannot be read as YAML ({error}): write one option per line, 'seed: 1'"
        ) from error
    if not isinstance(content, dict):
        raise MismatchError(f"{file} holds no options: write one per line, 'seed: 1'")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


# models and folders
ModelPath = Annotated[
    Path,
    typer.Argument(help="A Hugging Face checkpoint folder.", metavar="MODEL", show_default=False),
]
ModelA = Annotated[
    Path, typer.Argument(help="A checkpoint folder.", metavar="A", show_default=False)
]
ModelB = Annotated[
    Path,
    typer.Argument(
        help="Another, of the same architecture and size.", metavar="B", show_default=False
    ),
]
# Optional for the parser alone: that there are too few is said in one line, like everything else.
Models = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Checkpoint folders of one architecture and size, two or more.",
        metavar="A B",
        show_default=False,
    ),
]
Reference = Annotated[
    str,
    typer.Option(
        help="Of three models or more: whose coordinates all take, by its place from 0, or medoid (closest to all others; every pair is matched)."
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        help="Of three models or more: how often all are matched to the mean of the others at most.",
        min=0,
        show_default="10",
    ),
]
MergekitFile = Annotated[
    Path | None,
    typer.Option(
        "--mergekit",
        help="Also write a recipe for mergekit here: what is aligned is stock, and mergekit merges it.",
        show_default=False,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        help="The folder to write. It appears whole or not at all.",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")]
Units = Annotated[
    str,
    typer.Option(
        help="Of models of different width: what a narrow one has too few of is dead there (zero), or used twice (split)."
    ),
]
SharedTokens = Annotated[
    bool,
    typer.Option(
        "--shared-tokens",
        help="Of two models with different vocabularies: match the tokens both have; the result has A's tokenizer and keeps A's other rows.",
    ),
]
ShardSize = Annotated[
    float, typer.Option("--max-shard-size", help="The largest weights file, in GB.", min=0.000001)
]
NoVerify = Annotated[
    bool,
    typer.Option(
        "--no-verify", help="Skip the check that the function did not change; the card will say so."
    ),
]
Residual = Annotated[
    str,
    typer.Option(
        help="How the stream may move: full, permutation (keeps a tied head tied) or identity."
    ),
]

# how to find the symmetry
Method = Annotated[
    str | None,
    typer.Option(
        help=f"How to find the symmetry: {either(METHODS)}. Weights need no data; learned makes its own, but for classifiers of texts.",
        show_default="weights, or by recipe",
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        help=" ".join(
            f"{method.capitalize()}: {families(names)}." for method, names in BY_METHOD.items()
        )
        + " A dash goes on with the name before.",
        show_default="ours, by method",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Inputs on which activations are seen, or that are learned from: self (no data: text the models write, or pictures drawn for them), digits:train, python-docs:train, a file (text, .xz, TSV, CSV, JSONL,"
        " .npz), a folder of pictures, or hf:NAME. What models were trained on, never what a merge is measured on.",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None, typer.Option(help="How many samples of --data to use.", show_default="by task")
]
StatisticsFile = Annotated[
    Path | None,
    typer.Option(
        "--statistics",
        help="What symmerge statistics wrote for this pair: no pass over data.",
        show_default=False,
    ),
]
ScoreName = Annotated[
    str | None,
    typer.Option(
        "--score", help=f"How activations are compared: {either(SCORES)}.", show_default="by recipe"
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where an interrupted run with the same options was.")
]
Metric = Annotated[
    str | None,
    typer.Option(help=f"How heads are compared: {either(METRICS)}.", show_default="by recipe"),
]
Inside = Annotated[
    str | None,
    typer.Option(
        help=f"How the basis inside heads is found: {either(INSIDES)}.", show_default="by recipe"
    ),
]
Tries = Annotated[
    int | None,
    typer.Option(help="How many weightings to try at most.", min=1, show_default="by size"),
]
SweepsMost = Annotated[
    int | None,
    typer.Option("--sweeps", help="How many sweeps at most.", min=1, show_default="by recipe"),
]
TokenCounts = Annotated[
    Path | None,
    typer.Option(
        help="How often each token occurred in training, as .npy: those that never did are left out.",
        show_default=False,
    ),
]

# how to learn
Steps = Annotated[
    int | None, typer.Option(help="How many steps to learn.", min=1, show_default="300")
]
Epochs = Annotated[
    float | None,
    typer.Option(
        help="How many times to go through all that is learned from, instead of --steps.",
        show_default=False,
    ),
]
Rate = Annotated[float | None, typer.Option(help="How far a step goes.", show_default="by recipe")]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        help="Samples of a batch: fewer need less memory.",
        min=1,
        show_default="by task",
    ),
]
Accumulate = Annotated[
    int | None,
    typer.Option(
        help="Batches of a step: more make it calmer, and need no more memory.",
        min=1,
        show_default="1",
    ),
]
SamplerName = Annotated[
    str | None,
    typer.Option(
        "--sampler", help=f"Where between A and B to learn: {SAMPLERS}.", show_default="narrow"
    ),
]
Concentration = Annotated[
    float | None,
    typer.Option(
        help="Of three models or more: where among them to learn; 0.1 near the corners (as published), 10 near the middle.",
        show_default="10",
    ),
]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="What the middle should answer: parents (what they say together) or labels.",
    ),
]
SpaceNames = Annotated[
    str | None,
    typer.Option(
        "--spaces",
        help=f"What may move, with commas: {either(PARTS)}, or single spaces of inspect.",
        show_default="all",
    ),
]
StartName = Annotated[
    str | None,
    typer.Option(
        "--start-from",
        help=f"Where learning starts: {either(STARTS)}.",
        show_default="activations with data, else weights",
    ),
]
PermutationsOnly = Annotated[
    bool,
    typer.Option(
        "--permutations-only",
        help="Learn permutations alone, as published: --recipe learned-permutations.",
    ),
]
Patience = Annotated[
    int | None,
    typer.Option(
        help="Stop after so many looks (20 a run) without a better one.", min=1, show_default="10"
    ),
]
SolveType = Annotated[
    str, typer.Option("--dtype", help=f"The precision to solve in: {either(DTYPES)}.")
]
Device = Annotated[str, typer.Option(help="Where to solve: cpu or cuda.")]

# every verb
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A YAML file with any of these options.",
        callback=_configure,
        is_eager=True,
        show_default=False,
    ),
]


# What a model of each task looks at, in words.
INPUTS = {
    "mlm": "a text file, python-docs:train or hf:NAME; or self, which needs no data: the models write the text",
    "clm": "a text file, python-docs:train or hf:NAME; or self, which needs no data: the models write the text",
    "image": "digits:train, an .npz file, a folder with a subfolder of pictures per class, or hf:NAME; or self, which needs no data: pictures are drawn",
    "text": "a TSV, CSV or JSONL file with the columns label and text, or hf:NAME",
}


def different(models: Sequence[Path] | None, what: str) -> tuple[Path, ...]:
    """Two models or more, each given once."""
    models = models or ()
    if len(models) < 2:
        raise MismatchError(f"{' and '.join(map(str, models)) or 'no model'}: {what}")
    seen: set[Path] = set()
    for folder in models:
        if folder.resolve() in seen:
            raise MismatchError(f"{folder} is given twice: name every model once")
        seen.add(folder.resolve())
    return tuple(models)


def opened(folders: Sequence[Path], units: str) -> list[Model]:
    """The models, all as wide as the widest: narrow ones are written as wide ones that compute the same, and that is said."""
    choice("--units", units, UNITS)
    models = [load(folder) for folder in folders]
    widest = max(models, key=lambda model: model.parameters)
    found = []
    for model in models:
        other = model.spec.architecture == widest.spec.architecture and _widths(model) != _widths(
            widest
        )
        if other:
            warnings.warn(
                f"{model.where} is narrower than {widest.where}: it is written as wide, and computes the same",
                SymmergeWarning,
                stacklevel=2,
            )
        found.append(widen(model, widest, units=units) if other else model)  # type: ignore[arg-type]
    return found


def _widths(model: Model) -> dict[str, int]:
    return {name: model.spec.sizes[name] for name in model.spec.hidden}


def reference_of(given: str, models: Sequence[Any]) -> int | str:
    """Whose coordinates all take, as universe matching wants it."""
    if given == MEDOID:
        return given
    if not given.isdecimal() or int(given) >= len(models):
        raise MismatchError(
            f"--reference {given}: give a place from 0 to {len(models) - 1}, or {MEDOID}"
        )
    return int(given)


def chosen_recipe(
    method: str | None = None, name: str | None = None, *, non_symmetric: bool = False
) -> Recipe:
    """The recipe that two options ask for. One that is no symmetry is refused unless it is only to be measured (`loose`)."""
    if method is not None:
        choice("--method", method, METHODS)
    chosen = get_recipe(name or METHODS[method or "weights"])
    if method not in (None, chosen.method):
        raise MismatchError(
            f"--recipe {name} is for --method {chosen.method}, not {method}: leave out --method, or choose one of {', '.join(BY_METHOD[method])}"
        )
    if chosen.non_symmetric and not non_symmetric:
        raise SymmetryError(
            f"recipe {name} is no symmetry: what it gives is another function than the model's; measure it with barrier"
        )
    return chosen


def inputs(
    models: Sequence[Model],
    data: str,
    *,
    samples: int | None = None,
    learned: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Task:
    """What models of one kind look at: their own task on some data; more of it, where it is learned from."""
    name = task_of(models[0])
    return make_task(
        name,
        data,
        models,
        samples=samples,
        max_samples=most_inputs(name, data) if learned else None,
        seed=seed,
        device=local_device(device),
    )


LEARNING = (
    "steps",
    "epochs",
    "lr",
    "batch_size",
    "accumulate",
    "sampler",
    "concentration",
    "target",
    "spaces",
    "start",
    "patience",
)


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
    permutations_only: bool = False,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    **learning: Any,
) -> Recipe:
    """What align and merge solve with, from their options; wrong ones are refused before any work. `learning` is what `LEARNING` names."""
    if permutations_only:
        if name not in (None, "learned-permutations") or method not in (None, "learned"):
            raise MismatchError(
                "--permutations-only is a recipe of --method learned: leave out --recipe, or ask for learned-permutations"
            )
        name = "learned-permutations"
    chosen = chosen_recipe(method, name)
    for option, given, known in (
        ("--dtype", dtype, DTYPES),
        ("--metric", metric, METRICS),
        ("--inside", inside, INSIDES),
        ("--score", score, SCORES),
    ):
        if given is not None:
            choice(option, given, known)
    device_of(device)
    counts = read_token_counts(token_counts) if token_counts else None
    how = {
        "metric": metric,
        "inside": inside,
        "tries": tries,
        "max_sweeps": sweeps,
        "token_counts": counts,
        "dtype": getattr(torch, dtype),
    }
    learns = chosen.method in ("learned", "soft")
    _refuse_unused(
        chosen,
        learning,
        {"data": data, "samples": samples, "statistics": statistics, "score": score},
    )
    if not chosen.needs_data:
        return with_options(chosen, **how, seed=seed, device=device)
    if data is None and learns and task_of(models[0]) in SELF_SOURCES:
        data = "self"
    if data is None and (statistics is None or samples is not None):
        what = (
            "learning needs something to learn from"
            if learns
            else "activations need something to look at"
        )
        raise MismatchError(f"{what}: give --data: {INPUTS[task_of(models[0])]}")
    made = (
        inputs(models, data, samples=samples, learned=learns, seed=seed, device=device)
        if data
        else None
    )
    if not learns:
        looking = {
            "statistics": Statistics.load(statistics) if statistics else None,
            "score": score,
            "partial": partial,
        }
        return with_options(chosen, **how, **looking, data=made, seed=seed, device=device)
    chosen = with_options(chosen, data=made, seed=seed, device=device, **_learning(learning, made))
    # the start's own options last, when it is known which it is
    return with_options(
        chosen,
        **{
            key: value
            for key, value in how.items()
            if value is not None and (key, value) != ("dtype", torch.float32)
        },
    )


def _refuse_unused(chosen: Recipe, learning: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
    """Options that this method would not look at."""
    for option, given in seen.items():
        if given is not None and not chosen.needs_data:
            raise MismatchError(
                f"--{option} {given}: weights are matched without data; add --method activations or learned"
            )
        if (
            given is not None
            and option in ("statistics", "score")
            and chosen.method != "activations"
        ):
            raise MismatchError(f"--{option} {given}: only --method activations takes it")
    for name, given in learning.items():
        option = name.replace("_", "-")
        if given is not None and chosen.method not in ("learned", "soft"):
            raise MismatchError(
                f"--{option} {given}: nothing is learned by {chosen.method}; add --method learned"
            )
        if given is not None and name not in {known.name for known in fields(chosen.matching)}:
            raise MismatchError(f"--{option} {given}: only --method learned takes it")


def _learning(given: Mapping[str, Any], data: Task | None) -> dict[str, Any]:
    """The options of learning, as the solver takes them."""
    found = dict(given)
    if found.get("target") is not None:
        choice("--target", found["target"], TARGETS)
    if found.get("spaces") is not None:
        found["spaces"] = tuple(name.strip() for name in found["spaces"].split(","))
    if (start := found.get("start")) is not None:
        choice("--start-from", start, STARTS)
        found["start"] = (
            start
            if start == "identity"
            else WeightMatching()
            if start == "weights"
            else LearnedMatching.activations(data)
        )
    return found
