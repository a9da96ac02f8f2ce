"""The demonstration: models of two seeds, destroyed by averaging, saved by alignment. And every family, moved by a random symmetry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symmerge import report  # the module: what draws is loaded when it is used
from symmerge.aligning.pair import Aligned, align, write_evidence
from symmerge.checkpoints.files import write_text
from symmerge.checkpoints.folders import new_folder
from symmerge.errors import CheckpointError
from symmerge.evaluation.lines import LineMethod, measure_lines, write_curves
from symmerge.evaluation.results import CurveFile, MethodLine
from symmerge.evaluation.tasks import Task, make_task
from symmerge.lab.small_models import SMALL, small_model
from symmerge.lab.training.loop import METRICS, train, trained
from symmerge.lab.training.recipes import DEMO, TrainingRecipe
from symmerge.matching.recipes import DATA_FREE, RECIPES, Recipe, with_options
from symmerge.matching.weights import WeightMatching
from symmerge.merging.means import merge
from symmerge.models.inspection import spaces
from symmerge.models.model import Model, Progress, load, save
from symmerge.models.orbit import random_member
from symmerge.symmetry.groups.linalg import one_thread
from symmerge.verification.verdict import verify

RECOMMENDED = "symmerge"
# From weights: the search over activations has its own line.
LEARNED = with_options(RECIPES["learned"], steps=100, start=WeightMatching())
METHODS = {
    **DATA_FREE,
    "activations": RECIPES["activations"],
    "correlation": RECIPES["correlation"],
    "learned": LEARNED,
}
# samples of the training data that methods look at, or learn from
SEEN = {"activations": {"image": 200, "clm": 48}, "learned": {"image": 1200, "clm": 200}}
Bar = Callable[
    [str, int], AbstractContextManager[Progress]
]  # what is being done, and in how many steps
PLAIN = "none"


def _silent(what: str, steps: int) -> AbstractContextManager[Progress]:
    return nullcontext(lambda item: None)


@dataclass(frozen=True)
class DemoOutcome:
    """The table of barriers, and where everything is."""

    rows: tuple[dict[str, Any], ...]
    page: Path
    merged: tuple[Path, ...]


def demo(
    out: Path,
    seed: int = 0,
    *,
    recipes: Mapping[str, TrainingRecipe] = DEMO,
    methods: Mapping[str, Recipe] = METHODS,
    points: int = 21,
    bar: Bar = _silent,
) -> DemoOutcome:
    """Train two models of each recipe (once: OUT/models keeps them), merge them by every method, measure on held-out data, write it all.

    Methods that look at data see some of what the models were trained on, never what is measured on.

    OUT gets a folder for each recipe (curve.json, curve.csv, curve.svg, structure.json, averaged, merged) and page.html.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {out}: {error.strerror}; choose another --out"
        ) from error
    with one_thread():
        rows = [
            row
            for name, recipe in recipes.items()
            for row in _pair(out, name, recipe, seed, methods, points, bar)
        ]
    return DemoOutcome(
        tuple(rows),
        report.report(out, out / "page.html"),
        tuple(out / name / "merged" for name in recipes),
    )


def _pair(
    out: Path,
    name: str,
    recipe: TrainingRecipe,
    seed: int,
    methods: Mapping[str, Recipe],
    points: int,
    bar: Bar,
) -> list[dict[str, Any]]:
    folder = out / name
    a, b = (
        load(_parent(out / "models" / f"{name}-seed-{number}", name, recipe, number, bar))
        for number in (2 * seed, 2 * seed + 1)
    )
    task = make_task(recipe.task, recipe.data, [a, b])
    seen = {
        how: make_task(
            recipe.task, f"{recipe.data}:train", [a, b], max_samples=samples[recipe.task]
        )
        for how, samples in SEEN.items()
    }
    ready = {
        key: with_options(method, data=seen[method.method]) if method.needs_data else method
        for key, method in methods.items()
    }
    found = _aligned(a, b, name, ready, bar)
    plain = LineMethod(PLAIN, "plain average", a, b)
    lines = [
        plain,
        *(
            LineMethod(key, key, one.reference, one.aligned, one.evidence(), one.solution.objective)
            for key, one in found.items()
        ),
    ]
    with bar(
        f"{name}: measuring {len(lines)} curves", len(lines) * points * len(task.batches)
    ) as tick:
        curves = measure_lines(a, b, lines, task, points=points, progress=tick)
    # Only what an earlier demonstration wrote is replaced.
    with new_folder(folder, overwrite=(folder / "curve.json").exists()) as new:
        best = _write(new, curves, a, b, found)
    return _rows(name, task, curves, best)


def _parent(folder: Path, name: str, recipe: TrainingRecipe, seed: int, bar: Bar) -> Path:
    """From the cache, if it was trained the very same way."""
    if trained(recipe, seed, folder):
        return folder
    with bar(f"{name}: training, seed {seed}", recipe.schedule.steps) as tick:
        return train(recipe, seed, folder, tick, overwrite=(folder / METRICS).exists())


def _aligned(
    a: Model, b: Model, name: str, methods: Mapping[str, Recipe], bar: Bar
) -> dict[str, Aligned]:
    found = {}
    with bar(f"{name}: aligning", len(methods)) as tick:
        for key, recipe in methods.items():
            found[key] = align(a, b, recipe)
            tick(key)
    return found


def _write(
    folder: Path, curves: CurveFile, a: Model, b: Model, found: Mapping[str, Aligned]
) -> str:
    """Everything about a pair; returns the method with the lowest barrier."""
    aligned = [method for method in curves.methods if method.name in found]
    best = min(aligned, key=lambda method: method.barrier_mean).name
    write_curves(curves, folder)
    write_text(folder / "curve.svg", report.curve_svg(curves))
    # The merge is by the recommended method: the one that did best here was found by looking at held-out data.
    chosen = found.get(RECOMMENDED, found[best])
    write_evidence(chosen, folder)
    # How alike features are is known where some method looked at data.
    if alike := next(
        (one.solution.correlations for one in found.values() if one.solution.correlations), None
    ):
        alike.write(folder / "correlations.json")
    save(merge(a, b), folder / "averaged")
    save(merge(chosen.reference, chosen.aligned, evidence=chosen.evidence()), folder / "merged")
    return best


def _rows(name: str, task: Task, curves: CurveFile, best: str) -> list[dict[str, Any]]:
    plain, metric = curves.methods[0], task.metrics[1]
    return [
        {
            "models": name,
            "method": method.label + (" (best)" if method.name == best else ""),
            "barrier": method.barrier_mean,
            "averaging's is larger by": ""
            if method is plain
            else f"{plain.barrier_mean / max(method.barrier_mean, 1e-9):.1f} times",
            "merged loss": _midpoint(method)["loss"],
            "and besides": f"{metric} {_midpoint(method)[metric]:.3g}",
        }
        for method in curves.methods
    ]


def _midpoint(method: MethodLine) -> Mapping[str, float]:
    return min(method.points, key=lambda point: abs(point.t - 0.5)).metrics


def family_rows(seed: int = 0) -> Iterator[dict[str, Any]]:
    """For a small model of every family, moved by a random symmetry: how far its weights went, and how far its logits did."""
    for name in SMALL:
        model = load(small_model(name, seed=seed))
        _, moved = random_member(model, seed)
        verdict = verify(model, moved)
        yield {
            "model": name,
            "class": model.spec.architecture,
            "spaces": len(moved.spec.hidden),
            "freedom": sum(row["degrees of freedom"] for row in spaces(moved.spec)),
            "weight change": weight_change(model, moved),
            "logit change": verdict.difference,
            "same function": "yes" if verdict.same else "NO",
        }


def weight_change(a: Model, b: Model) -> float:
    """|weights A - weights B| / |weights A|, over the tensors both have."""
    shared = [name for name in a.weights if name in b.weights]
    apart = sum((a.weights[name] - b.weights[name]).square().sum().item() for name in shared)
    return (apart / sum(a.weights[name].square().sum().item() for name in shared)) ** 0.5
