"""The demo: models of two seeds, which averaging destroys, merged after alignment.

Then two models of different skills, merged into one without data, and in the second part
also a small model of every family, transformed by a random symmetry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from symmerge import report  # the package: imports matplotlib on first use
from symmerge.aligning.aligned import Aligned, write_evidence
from symmerge.aligning.pair import align
from symmerge.checkpoints.card import public_name
from symmerge.checkpoints.files import write_text
from symmerge.checkpoints.folders import new_folder
from symmerge.errors import CheckpointError
from symmerge.evaluation.lines import LineMethod, measure_lines, write_curves
from symmerge.evaluation.results import CurveFile, MethodLine
from symmerge.evaluation.tasks import Task, make_task
from symmerge.lab.small_models import SMALL, small_model
from symmerge.lab.training.loop import METRICS, train, trained
from symmerge.lab.training.recipes import DEMO, SKILLS, TrainingRecipe
from symmerge.matching.recipes import DATA_FREE, RECIPES, Recipe, with_options
from symmerge.matching.weights import WeightMatching
from symmerge.merging.means import average
from symmerge.merging.verdict import judge
from symmerge.merging.verdict_results import (
    AVERAGE,
    ENSEMBLE,
    MERGE,
    PARENT,
    MergeVerdict,
    VerdictRow,
)
from symmerge.merging.verdict_words import conclude
from symmerge.models.inspection import spaces
from symmerge.models.model import (
    Model,
    load,
)
from symmerge.models.orbit import random_member
from symmerge.models.progress import Progress
from symmerge.models.saving import save
from symmerge.report.published import publish
from symmerge.symmetry.groups.linalg import one_thread
from symmerge.verification.verdict import verify

# What is merged, if it was tried: chosen before anything is measured, as a user would.
RECOMMENDED = ("learned", "symmerge")
# Starts from weight matching: activation matching is a separate row here.
LEARNED = with_options(RECIPES["learned"], steps=100, start=WeightMatching())
METHODS = {
    **DATA_FREE,
    "activations": RECIPES["activations"],
    "correlation": RECIPES["correlation"],
    "learned": LEARNED,
}
GENERALIST = "standard"  # the effort by which skills are merged
# Training samples that methods use, by task.
SAMPLES = {"activations": {"image": 200, "clm": 48}, "learned": {"image": 1200, "clm": 200}}
Bar = Callable[[str, int], AbstractContextManager[Progress]]
"""Makes a progress bar from a title and a number of steps."""
PLAIN = "none"


def _silent(what: str, steps: int) -> AbstractContextManager[Progress]:
    return nullcontext(lambda item: None)


@dataclass(frozen=True)
class DemoOutcome:
    """The table of barriers, the page, and the merged models with their verdicts."""

    rows: tuple[dict[str, object], ...]
    page: Path
    merged: Mapping[Path, MergeVerdict]


def demo(
    out: Path,
    seed: int = 0,
    *,
    recipes: Mapping[str, TrainingRecipe] = DEMO,
    methods: Mapping[str, Recipe] = METHODS,
    skills: Mapping[str, TrainingRecipe] = SKILLS,
    points: int = 21,
    bar: Bar = _silent,
) -> DemoOutcome:
    """Train two models per recipe, merge them by every method, and measure on held-out data.

    Then one model for each of the `skills`, on data of its own; all of them merged without data.
    Models stay in OUT/models and are trained once. Methods may use training data only.
    OUT gets page.html, and a folder for each recipe: curve.json, curve.csv, curve.svg,
    structure.json, averaged, merged; OUT/skills is the merge of skills.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {out}: {error.strerror}; choose another --out"
        ) from error
    with one_thread():
        demo_of = _Demo(out, seed, methods, points, bar)
        pairs = {name: demo_of.pair(name, recipe) for name, recipe in recipes.items()}
        generalist = {out / "skills": demo_of.merge_skills(skills)} if skills else {}
    page = report.report(out, out / "page.html")
    merged = {out / name / "merged": verdict for name, (_, verdict) in pairs.items()} | generalist
    return DemoOutcome(tuple(row for rows, _ in pairs.values() for row in rows), page, merged)


@dataclass(frozen=True)
class _Demo:
    out: Path
    seed: int
    methods: Mapping[str, Recipe]
    points: int
    bar: Bar

    def pair(
        self, name: str, recipe: TrainingRecipe
    ) -> tuple[list[dict[str, object]], MergeVerdict]:
        """Measure two models of a recipe: write their folder, return rows and the verdict."""
        a, b = (load(self._parent(name, recipe, 2 * self.seed + which)) for which in (0, 1))
        task = make_task(recipe.task, recipe.data, [a, b])
        pairs = self._align(name, recipe, a, b)
        lines = [LineMethod(PLAIN, "plain average", a, b)]
        for key, pair in pairs.items():
            evidence, objective = pair.evidence(), pair.solution.objective
            lines.append(LineMethod(key, key, pair.reference, pair.aligned, evidence, objective))
        steps = len(lines) * self.points * len(task.batches)
        with self.bar(f"{name}: measuring {len(lines)} curves", steps) as tick:
            curves = measure_lines(a, b, lines, task, points=self.points, progress=tick)
        folder = self.out / name
        # Replace only what an earlier demo wrote.
        with new_folder(folder, overwrite=(folder / "curve.json").exists()) as new:
            verdict = _write(new, curves, a, b, pairs)
        return _rows(name, task, curves, pairs), verdict

    def merge_skills(self, recipes: Mapping[str, TrainingRecipe]) -> MergeVerdict:
        """One model of several that were trained on different data, without data of any."""
        parents = [
            load(self._parent(name, recipe, 2 * self.seed + which))
            for which, (name, recipe) in enumerate(recipes.items())
        ]
        folder = self.out / "skills"
        with self.bar("skills: merging", 2) as tick:
            result = align(parents[0], parents[1], GENERALIST)
            tick("aligned")
            merged = average(*result.models, evidence=result.evidence())
            data = [recipe.data for recipe in recipes.values()]
            verdict = judge(merged, parents, skills=data, aligned=result.models)
            tick("measured")
        publish(merged, verdict, folder, overwrite=(folder / "verdict.json").exists())
        return verdict

    def _parent(self, name: str, recipe: TrainingRecipe, seed: int) -> Path:
        """A trained model; an existing one with the same recipe and seed is reused."""
        folder = self.out / "models" / f"{name}-seed-{seed}"
        if trained(recipe, seed, folder):
            return folder
        with self.bar(f"{name}: training, seed {seed}", recipe.schedule.steps) as tick:
            there = (folder / METRICS).exists()
            return train(recipe, seed, folder, tick, overwrite=there, resume=True)

    def _align(self, name: str, recipe: TrainingRecipe, a: Model, b: Model) -> dict[str, Aligned]:
        source, pairs = f"{recipe.data}:train", {}
        data = {
            method: make_task(recipe.task, source, [a, b], max_samples=samples[recipe.task])
            for method, samples in SAMPLES.items()
        }
        with self.bar(f"{name}: aligning", len(self.methods)) as tick:
            for key, method in self.methods.items():
                if method.needs_data:
                    method = with_options(method, data=data[method.method])
                pairs[key] = align(a, b, method)
                tick(key)
        return pairs


def _write(
    folder: Path, curves: CurveFile, a: Model, b: Model, pairs: Mapping[str, Aligned]
) -> MergeVerdict:
    """Write everything about a pair of models; returns the verdict on their merge."""
    write_curves(curves, folder)
    write_text(folder / "curve.svg", report.curve_svg(curves))
    name = next((name for name in RECOMMENDED if name in pairs), next(iter(pairs)))
    chosen, verdict = pairs[name], _verdict(curves, name)
    write_evidence(chosen, folder)
    # Feature correlations exist if a method used data.
    known = (pair.solution.correlations for pair in pairs.values())
    if correlations := next(filter(None, known), None):
        correlations.write(folder / "correlations.json")
    save(average(a, b), folder / "averaged")
    merged = average(chosen.reference, chosen.aligned, evidence=chosen.evidence())
    publish(merged, verdict, folder / "merged")
    return verdict


def _verdict(curves: CurveFile, merged: str) -> MergeVerdict:
    """The verdict on the midpoint of a method, from what the curves measured."""
    plain = curves.methods[0]
    method = next(method for method in curves.methods if method.name == merged)
    names = [public_name(model.where) for model in (curves.models.a, curves.models.b)]
    ends = zip("AB", names, (plain.points[0], plain.points[-1]), strict=True)
    rows = [VerdictRow(f"{letter}: {name}", PARENT, end.metrics) for letter, name, end in ends]
    rows.append(VerdictRow("plain average", AVERAGE, _midpoint(plain)))
    rows.append(VerdictRow("merge", MERGE, _midpoint(method)))
    if curves.ensemble:
        rows.append(VerdictRow("ensemble", ENSEMBLE, curves.ensemble))
    lines = {"aligned_line": method.points, "plain_line": plain.points}
    return replace(conclude(curves.task, rows), **lines)


def _rows(
    name: str, task: Task, curves: CurveFile, pairs: Mapping[str, Aligned]
) -> list[dict[str, object]]:
    plain, metric = curves.methods[0], task.metrics[1]
    aligned = [method for method in curves.methods if method.name in pairs]
    best = min(aligned, key=lambda method: method.barrier_mean).name
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
    """Change of weights and logits under a random symmetry, for a small model per family."""
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
