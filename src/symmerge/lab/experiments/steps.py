"""The steps of experiments: train a model, measure a line, merge many, count symmetries.

Every step is `(settings, needs, folder, say) -> result`, see `cells.py`.
The model of a cell is `folder / "model"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Literal

import torch

from symmerge.aligning.many import align_many
from symmerge.aligning.pair import align
from symmerge.checkpoints.hashes import checkpoint_digest
from symmerge.errors import CheckpointError, DataError
from symmerge.evaluation.lines import LineMethod, by_circuits, measure_lines
from symmerge.evaluation.simplices import mean_of_first, measure_simplex
from symmerge.evaluation.tasks import Task, make_task, task_of
from symmerge.evaluation.tasks.base import subsample
from symmerge.lab.experiments.cells import Result, Settings
from symmerge.lab.experiments.components import PLAIN
from symmerge.lab.experiments.external import DataSource
from symmerge.lab.training.loop import train as fit
from symmerge.lab.training.prepared import held_out_data, training_data
from symmerge.lab.training.recipes import training_recipe, with_changes
from symmerge.matching.learning.data import max_inputs
from symmerge.matching.learning.start import START_SAMPLES, activation_start
from symmerge.matching.recipes import Recipe, get_recipe, with_options
from symmerge.matching.search import Matching
from symmerge.matching.weights import WeightMatching
from symmerge.models.alignment import Alignment, apply
from symmerge.models.canonical.form import canonicalize
from symmerge.models.inspection import summary
from symmerge.models.model import Model, load
from symmerge.models.widening import widen
from symmerge.verification.verdict import verify

VERSION = 4
CHANGED = (
    "{} is missing, or not what it was when the experiment began:"
    " restore it, or start again with what is there now"
)
Say = Callable[[str], None]
# Start of learned matching, by name: a solver from data and device.
STARTS: Mapping[str, Callable[[Task, str], Matching | Literal["identity"]]] = {
    "weights": lambda _, device: WeightMatching(device=device),
    "weights-only": lambda _, device: WeightMatching(generate_text=False, device=device),
    "activations": lambda task, device: activation_start(task, device=device),
    "identity": lambda *_: "identity",
}


def train(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Train a recipe from its seed, or from a needed model with a component re-initialised."""
    recipe = with_changes(
        training_recipe(settings["recipe"]),
        config=settings.get("config", {}),
        schedule=settings.get("schedule", {}),
    )
    begin = {"begin": needs[0] / "model", "fresh": settings.get("fresh")} if needs else {}
    options = {"data": _root(settings), "device": settings["device"], **begin}
    fit(recipe, settings["seed"], folder / "model", say, **options)
    return {}


def external(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Link to an external model."""
    place = Path(settings["place"])
    if not place.is_dir() or checkpoint_digest(place) != settings["content"]:
        raise CheckpointError(CHANGED.format(place))
    (folder / "model").symlink_to(place)
    return {}


def line(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Align two models by a method and measure the line between them.

    With `circuits` once more with attention averaged as circuits.
    """
    a, b = _pair(needs)
    task = _task(settings, [a, b])
    method, correlations = _aligned(settings, a, b, say)
    result = _measure(settings, a, b, method, task) | correlations
    if settings.get("circuits"):
        result["circuits"] = _measure(settings, a, b, by_circuits(method, a), task)
    if method.exact and method.name != PLAIN:
        result["changed"] = verify(b, method.b).difference
    return result


def orders(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Every order of the heads of the first attention layer, with the best bases inside them.

    `place` is the rank of the order that matching chooses.
    """
    a, b = _pair(needs)
    task, recipe = _task(settings, [a, b]), get_recipe("two-stage")
    fixed = replace(recipe, restrict={**recipe.restrict, "head": "identity"})
    free = recipe.prepare(b)
    heads = next(name for name in free.spec.hidden if name.partition(".")[0] == "head")
    identity, rows = Alignment.identity(free.spec), []
    for order in permutations(range(free.spec.sizes[heads])):
        elements = {**identity.elements, heads: {"index": torch.tensor(order)}}
        aligned = align(a, apply(Alignment(free.spec, elements), free), fixed)
        method = LineMethod(PLAIN, "", aligned.reference, aligned.aligned)
        measured = _measure(settings, a, b, method, task)
        rows.append({"order": list(order), "distance": aligned.after, **measured})
        say(f"order {order}")
    chosen = align(a, b, recipe).solution.alignment[heads]["index"].tolist()
    rows.sort(key=lambda row: row["midpoint"])
    place = next(at for at, row in enumerate(rows, 1) if row["order"] == chosen)
    ranks = {"best": 0, "ours": place - 1, "median": len(rows) // 2, "worst": -1}
    midpoints = {name: rows[rank]["midpoint"] for name, rank in ranks.items()}
    return {"orders": rows, "place": place, **midpoints}


def together(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Align many models: barriers of the means of the first k, and mean barrier of the pairs."""
    models = [load(need / "model") for need in needs]
    task = _task(settings, models)
    if settings["method"] != PLAIN:
        models = list(align_many(models, _solver(settings, models), progress=say).models)
    options = {"points": settings["points"], "device": settings["device"]}
    simplex = measure_simplex(models, task, steps=1, **options)
    count = len(models)
    pairs = [simplex.barriers[i][j] for i in range(count) for j in range(i)]
    means = {f"mean_of_{merged}": simplex.barrier(merged) for merged in range(2, count + 1)}
    return {
        **means,
        "pairs": sum(pairs) / len(pairs),
        "all": simplex.barrier(count),
        "losses": [
            simplex.at[mean_of_first(count, merged)]["loss"] for merged in range(1, count + 1)
        ],
    }


def freedom(settings: Settings, needs: list[Path], folder: Path, say: Say) -> Result:
    """Size of an architecture's symmetry group: continuous dimensions, log10 of discrete order."""
    import transformers
    from transformers.initialization import no_init_weights

    kind = getattr(transformers, settings["architecture"])
    with no_init_weights():  # shapes say it all, and random numbers take twenty times as long
        module = kind(kind.config_class(**settings["config"]))
    for parameter in module.parameters():
        parameter.detach().zero_()
    inspected = summary(load(module))
    inside = sum(
        row["degrees of freedom"]
        for row in inspected["spaces"]
        if row["space"].partition(".")[0] in ("qk", "vo")
    )
    return {
        "continuous": inspected["degrees of freedom"],
        "discrete": inspected["discrete (log10)"],
        "attention": inside,
        "parameters": inspected["parameters"],
        "spaces": inspected["spaces"],
    }


def _root(settings: Settings) -> Path | None:
    return Path(settings["data"]) if settings.get("data") else None


def _pair(needs: list[Path]) -> tuple[Model, Model]:
    """Both models, the wider one first."""
    a, b = (load(need / "model") for need in needs)
    return (a, b) if a.parameters >= b.parameters else (b, a)


def _task(settings: Settings, models: list[Model]) -> Task:
    kind, source = _source(settings, models, "test")
    samples, max_samples = settings.get("samples"), settings.get("max_samples")
    return make_task(kind, source, models[:1], samples=samples, max_samples=max_samples)


def _source(settings: Settings, models: list[Model], split: str) -> tuple[str, str]:
    """The task and its data, for evaluation (`test`) or alignment (`train`)."""
    if "recipe" not in settings:
        data = DataSource.at(settings["places"][split])
        if data.content != settings[split]:
            raise DataError(CHANGED.format(data.place))
        return settings["task"], data.place
    recipe = training_recipe(settings["recipe"])
    # Rows that are too long for a text classifier are left out.
    reader = models[0].path if recipe.task == "text" else None
    data_of = {"test": held_out_data, "train": training_data}[split]
    return recipe.task, data_of(recipe, _root(settings), reader)


def _solver(settings: Settings, models: list[Model]) -> Recipe:
    """The method's solver with its options and, if it needs inputs, training data or `self`."""
    recipe, options = get_recipe(settings["method"]), dict(settings["options"])
    if recipe.needs_data:
        own = options.pop("data", None) == "self"
        kind, source = (task_of(models[0]), "self") if own else _source(settings, models, "train")
        inputs, learns = options.pop("inputs", None), recipe.method != "activations"
        limit = inputs or (max_inputs(kind, source) if learns else None)
        device = settings["device"]
        task = make_task(kind, source, models, max_samples=limit, seed=1, device=device)
        options["data"] = task if inputs or learns else subsample(task, START_SAMPLES[task.name])
    if "spaces" in options:
        options["spaces"] = tuple(options["spaces"])
    if "start" in options:
        options["start"] = STARTS[options["start"]](options["data"], settings["device"])
    return with_options(recipe, **options, device=settings["device"])


def _aligned(settings: Settings, a: Model, b: Model, say: Say) -> tuple[LineMethod, Result]:
    """Both ends of the line, and feature correlations before and after, if known."""
    name, narrow = settings["method"], a.spec.sizes != b.spec.sizes
    b = widen(b, a) if narrow else b
    if name == PLAIN:
        return LineMethod(name, name, canonicalize(a, ("fold",)) if narrow else a, b), {}
    pair = align(a, b, _solver(settings, [a, b]), progress=say)
    correlations = pair.solution.correlations
    alike = {
        f"{row.space} {row.layer} {when}": getattr(row, when)
        for row in (correlations.layers if correlations else ())
        for when in ("before", "after")
    }
    exact = not pair.recipe.non_symmetric
    method = LineMethod(name, name, pair.reference, pair.aligned, exact=exact)
    return method, {"alike": alike} if alike else {}


def _measure(settings: Settings, a: Model, b: Model, method: LineMethod, task: Task) -> Result:
    """Metrics along the line, both barriers, and the midpoint against the ends.

    `midpoint` is its loss minus the mean of the ends, `gain` is the better end minus its loss;
    `parents` and `halfway` are the metrics of the ends, on average, and of the midpoint.
    """
    options = {"points": settings["points"], "device": settings["device"]}
    record = measure_lines(a, b, [method], task, **options).methods[0]
    names = ["t", *(name for name in record.points[0].metrics if name != "loss")]
    points = [{"t": point.t, **point.metrics} for point in record.points]
    curves = {name: [point[name] for point in points] for name in names}
    losses = [point.metrics["loss"] for point in record.points]
    ends = record.over or (losses[0], losses[-1])
    midpoint = losses[len(losses) // 2]
    return {
        "barrier_mean": record.barrier_mean,
        "barrier_linear": record.barrier_linear,
        "midpoint": midpoint - sum(ends) / 2,
        "gain": min(ends) - midpoint,
        "parents": {name: (curves[name][0] + curves[name][-1]) / 2 for name in names[1:]},
        "halfway": {name: curves[name][len(losses) // 2] for name in names[1:]},
        "losses": losses,
        "curves": curves,
    }
