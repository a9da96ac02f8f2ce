"""The steps that experiments are made of: train a model, measure a line between two, merge many, count symmetries.

Every step is `(settings, needs, folder, say) -> result`: see `cells.py`. A model that a cell trained lies in `folder / "model"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import torch

from symmerge.aligning.many import align_many
from symmerge.aligning.pair import align
from symmerge.checkpoints.hashes import checkpoint_digest
from symmerge.errors import CheckpointError, DataError
from symmerge.evaluation.lines import LineMethod, measure_lines
from symmerge.evaluation.results import MethodLine
from symmerge.evaluation.simplices import mean_of_first, measure_simplex
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.evaluation.tasks.base import subsample
from symmerge.lab.experiments.cells import Result
from symmerge.lab.experiments.components import PLAIN
from symmerge.lab.experiments.external import DataSource
from symmerge.lab.training.loop import train as fit
from symmerge.lab.training.prepared import held_out_data, training_data
from symmerge.lab.training.recipes import TrainingRecipe, training_recipe, with_changes
from symmerge.matching.learned import FIRST_SAMPLES, LearnedMatching, most_inputs
from symmerge.matching.recipes import Recipe, get_recipe, with_options
from symmerge.matching.search import Matching
from symmerge.matching.weights import WeightMatching
from symmerge.models.alignment import Alignment, apply
from symmerge.models.canonical.form import canonicalize
from symmerge.models.inspection import summary
from symmerge.models.model import Model, load
from symmerge.models.widening import widen
from symmerge.verification.verdict import verify

VERSION = 2
CHANGED = "{} is not here, or not what it was when the experiment began: restore it, or start anew with what is there now"
Settings = Mapping[str, Any]
Say = Callable[[str], None]
# where learning starts -> who finds it, given what is learned from and the device
STARTS: Mapping[str, Callable[[Task, str], Matching | Literal["identity"]]] = {
    "weights": lambda _, device: WeightMatching(device=device),
    "weights-only": lambda _, device: WeightMatching(generate_text=False, device=device),
    "activations": lambda task, device: LearnedMatching.activations(task, device=device),
    "identity": lambda *_: "identity",
}


def train(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """A model of a training recipe, from its seed; or, where a cell is needed, from that cell's model with a part of it fresh."""
    begin = {"begin": needs[0] / "model", "fresh": settings.get("fresh")} if needs else {}
    fit(
        _trained_by(settings),
        settings["seed"],
        folder / "model",
        say,
        data=_root(settings),
        device=settings["device"],
        **begin,
    )
    return {}


def external(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """A model that is there already: a link to it."""
    place = Path(settings["place"])
    if not place.is_dir() or checkpoint_digest(place) != settings["content"]:
        raise CheckpointError(CHANGED.format(place))
    (folder / "model").symlink_to(place)
    return {}


def line(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Two models brought together by a method, and the loss on the line between them."""
    a, b = _pair(needs)
    held, (method, alike) = _task(settings, [a, b]), _brought(settings, a, b, say)
    record = measure_lines(
        a, b, [method], held, points=settings["points"], device=settings["device"]
    )
    return (
        _measured(record.methods[0])
        | alike
        | (
            {"changed": verify(b, method.b).difference}
            if method.exact and method.name != PLAIN
            else {}
        )
    )


def orders(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Every order of the heads of the first attention layer, each with the best bases inside, and which one matching chooses."""
    a, b = _pair(needs)
    held, chosen = _task(settings, [a, b]), get_recipe("two-stage")
    free, fixed = (
        chosen.prepare(b),
        replace(chosen, restrict={**chosen.restrict, "head": "identity"}),
    )
    heads = next(name for name in free.spec.hidden if name.partition(".")[0] == "head")
    still, found = Alignment.identity(free.spec), []
    for order in permutations(range(free.spec.sizes[heads])):
        placed = apply(
            Alignment(free.spec, {**still.elements, heads: {"index": torch.tensor(order)}}), free
        )
        moved = align(a, placed, fixed)
        curve = measure_lines(
            a,
            b,
            [LineMethod(PLAIN, "", moved.reference, moved.aligned)],
            held,
            points=settings["points"],
            device=settings["device"],
        )
        found.append({"order": list(order), "distance": moved.after, **_measured(curve.methods[0])})
        say(f"order {order}")
    ours = align(a, b, chosen).solution.alignment[heads]["index"].tolist()
    found.sort(key=lambda row: row["middle"])
    place = next(at for at, row in enumerate(found, 1) if row["order"] == ours)
    named = {
        "best": found[0],
        "ours": found[place - 1],
        "median": found[len(found) // 2],
        "worst": found[-1],
    }
    return {"orders": found, "place": place, **{name: row["middle"] for name, row in named.items()}}


def together(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Many models brought together: how far the loss of their mean lies over theirs, and the mean barrier of the pairs by the same method."""
    models = [load(need / "model") for need in needs]
    held = _task(settings, models)
    if settings["method"] != PLAIN:
        models = list(align_many(models, _solver(settings, models), progress=say).models)
    found = measure_simplex(
        models, held, points=settings["points"], steps=1, device=settings["device"]
    )
    count = len(models)
    pairs = [found.barriers[i][j] for i in range(count) for j in range(i)]
    means = {f"mean_of_{merged}": found.barrier(merged) for merged in range(2, count + 1)}
    return {
        **means,
        "pairs": sum(pairs) / len(pairs),
        "all": found.barrier(count),
        "losses": [
            found.at[mean_of_first(count, merged)]["loss"] for merged in range(1, count + 1)
        ],
    }


def freedom(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """The symmetries of an architecture: degrees of freedom, and how many discrete ones there are (as a power of ten)."""
    import transformers

    kind = getattr(transformers, settings["architecture"])
    found = summary(load(kind(kind.config_class(**settings["config"]))))
    inside = sum(
        row["degrees of freedom"]
        for row in found["spaces"]
        if row["space"].partition(".")[0] in ("qk", "vo")
    )
    return {
        "continuous": found["degrees of freedom"],
        "discrete": found["discrete (log10)"],
        "attention": inside,
        "parameters": found["parameters"],
        "spaces": found["spaces"],
    }


def _root(settings: Settings) -> Path | None:
    return Path(settings["data"]) if settings.get("data") else None


def _trained_by(settings: Settings) -> TrainingRecipe:
    return with_changes(
        training_recipe(settings["recipe"]),
        config=settings.get("config", {}),
        schedule=settings.get("schedule", {}),
    )


def _pair(needs: list[Path]) -> tuple[Model, Model]:
    """Both models; a narrow one is written as wide as the other."""
    a, b = (load(need / "model") for need in needs)
    return (a, b) if a.parameters >= b.parameters else (b, a)


def _task(settings: Settings, models: list[Model]) -> Task:
    kind, source = _source(settings, models, "test")
    return make_task(
        kind, source, models[:1], samples=settings.get("samples"), max_samples=settings.get("most")
    )


def _source(settings: Settings, models: list[Model], part: str) -> tuple[str, str]:
    """The kind of task, and where to find what to measure on (`test`) or to look at (`train`): as given, or as the models were trained."""
    if "recipe" not in settings:
        found = DataSource.at(settings["places"][part])
        if found.content != settings[part]:
            raise DataError(CHANGED.format(found.place))
        return settings["task"], found.place
    by = training_recipe(settings["recipe"])
    find = {"test": held_out_data, "train": training_data}[part]
    return by.task, find(by, _root(settings), _reader(by, models))


def _reader(by: TrainingRecipe, models: list[Model]) -> Path | None:
    """A classifier of texts: rows that are too long for it are left out."""
    return models[0].path if by.task == "text" else None


def _solver(settings: Settings, models: list[Model]) -> Recipe:
    """The method with its options, and with something to look at where it needs that: training data, never what is measured on; or none (`self`)."""
    chosen, options = get_recipe(settings["method"]), dict(settings["options"])
    if chosen.needs_data:
        kind, source = (
            (task_of(models[0]), "self")
            if options.pop("data", None) == "self"
            else _source(settings, models, "train")
        )
        asked, learns = options.pop("inputs", None), chosen.method != "activations"
        task = make_task(
            kind,
            source,
            models,
            max_samples=asked or (most_inputs(kind, source) if learns else None),
            seed=1,
            device=settings["device"],
        )
        options["data"] = task if asked or learns else subsample(task, FIRST_SAMPLES[task.name])
    if "spaces" in options:
        options["spaces"] = tuple(options["spaces"])
    if "start" in options:
        options["start"] = STARTS[options["start"]](options["data"], settings["device"])
    return with_options(chosen, **options, device=settings["device"])


def _brought(settings: Settings, a: Model, b: Model, say: Say) -> tuple[LineMethod, Result]:
    """Both ends of the line, and how alike features are before and after, where that is known."""
    name = settings["method"]
    narrow = a.spec.sizes != b.spec.sizes
    ready = widen(b, a) if narrow else b
    if name == PLAIN:
        return LineMethod(name, name, canonicalize(a, ("fold",)) if narrow else a, ready), {}
    found = align(a, ready, _solver(settings, [a, ready]), progress=say)
    correlations = found.solution.correlations
    alike = {
        f"{row.space} {row.layer} {when}": getattr(row, when)
        for row in (correlations.layers if correlations else ())
        for when in ("before", "after")
    }
    return LineMethod(
        name, name, found.reference, found.aligned, exact=not found.recipe.non_symmetric
    ), {"alike": alike} if alike else {}


def _measured(line: MethodLine) -> Result:
    """Every metric along the line, both barriers, and the midpoint over the mean of the ends."""
    points = [point.to_json() for point in line.points]
    curves = {name: [point[name] for point in points] for name in points[0]}
    losses = [point.metrics["loss"] for point in line.points]
    del curves["loss"]
    ends = line.over or (losses[0], losses[-1])
    middle = losses[len(losses) // 2]
    over = {"middle": middle - sum(ends) / 2, "gain": min(ends) - middle}
    return {
        "barrier_mean": line.barrier_mean,
        "barrier_linear": line.barrier_linear,
        **over,
        "losses": losses,
        "curves": curves,
    }
