"""Loss along the straight line between two models (curve.json). Nothing is aligned here."""

from __future__ import annotations

import csv
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from symmerge.checkpoints.versions import installed_versions
from symmerge.errors import MismatchError
from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.mixture import Mixture, evaluate_mixture
from symmerge.evaluation.results import (
    CurveFile,
    CurvesFile,
    LinePoint,
    LineRecord,
    MeanPoint,
    MethodLine,
    MethodMeans,
    Metrics,
    ModelRecord,
    PairRecord,
)
from symmerge.evaluation.tasks import Task
from symmerge.models.circuit_form import circuit_ends
from symmerge.models.model import Model
from symmerge.models.progress import Progress, ProgressLike, reporter


@dataclass(frozen=True)
class Curve:
    """Metrics at every `t` from A (0) to B (1), and of the ensemble of both models.

    `parents` are the losses of A and B, where the ends of the line compute other functions.
    """

    ts: tuple[float, ...]
    points: tuple[Metrics, ...]
    ensemble: Metrics

    parents: tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The two losses that barriers are measured against."""
        return self.parents or (self.points[0]["loss"], self.points[-1]["loss"])

    @property
    def barrier_mean(self) -> float:
        """The largest loss minus the mean loss of the two ends."""
        return max(point["loss"] for point in self.points) - sum(self.ends) / 2

    @property
    def barrier_linear(self) -> float:
        """The largest height of the loss above the straight line between the two ends."""
        a, b = self.ends
        return max(
            point["loss"] - ((1 - t) * a + t * b)
            for t, point in zip(self.ts, self.points, strict=True)
        )

    def to_record(self) -> LineRecord:
        """For result files."""
        return LineRecord(
            points=tuple(map(LinePoint, self.ts, self.points)),
            barrier_mean=self.barrier_mean,
            barrier_linear=self.barrier_linear,
            over=self.parents,
        )


def even_steps(points: int) -> tuple[float, ...]:
    """Evenly spaced values of t from 0 to 1."""
    if points < 2:
        raise MismatchError(f"points {points}: a curve needs at least two, its ends")
    return tuple(i / (points - 1) for i in range(points))


def barrier(
    a: Model,
    b: Model,
    task: Task,
    points: int = 21,
    *,
    device: str = "cpu",
    progress: ProgressLike = None,
) -> Curve:
    """Measure the line between two models, in one pass over the data.

    `barrier(a, aligned, make_task("clm", "python-docs", [a]))`
    Three copies of the weights are in memory: both models and the mixture.
    """
    ts, progress = even_steps(points), reporter(progress)
    mixture = Mixture([a, b], device=device)
    metrics, ensemble = evaluate_mixture(mixture, task, [(1 - t, t) for t in ts], progress=progress)
    return Curve(ts, tuple(metrics), ensemble)


@dataclass(frozen=True)
class LineMethod:
    """One way to align a pair: the two aligned models, and how they were found.

    Unless `exact`, the aligned models do not compute the functions of the pair.
    """

    name: str
    label: str
    a: Model
    b: Model
    settings: Mapping[str, object] = field(default_factory=dict)
    objective: tuple[float, ...] = ()
    exact: bool = True


def by_circuits(line: LineMethod, original: Model) -> LineMethod:
    """The same line with attention averaged as circuits: no stock models, for comparison.

    `original` is a model of the pair as it was loaded, before a method fixed any of its spaces.
    """
    a, b = circuit_ends(line.a, line.b, original)
    return replace(line, name=f"{line.name}-circuits", label=f"{line.label}, circuits", a=a, b=b)


def measure_lines(
    a: Model,
    b: Model,
    methods: Sequence[LineMethod],
    task: Task,
    *,
    points: int = 21,
    device: str = "cpu",
    progress: Progress | None = None,
) -> CurveFile:
    """The line of every method between two models; the ensemble is that of the first method."""
    curves = [
        barrier(method.a, method.b, task, points, device=device, progress=progress)
        for method in methods
    ]
    exact = [curve for method, curve in zip(methods, curves, strict=True) if method.exact]
    if len(exact) < len(methods):
        parents = exact[0].ends if exact else barrier(a, b, task, 2, device=device).ends
        curves = [
            curve if method.exact else replace(curve, parents=parents)
            for method, curve in zip(methods, curves, strict=True)
        ]
    return CurveFile(
        task=task.to_record(),
        models=PairRecord(a=model_record(a), b=model_record(b)),
        methods=tuple(map(_method_line, methods, curves)),
        ensemble=dict(curves[0].ensemble),
        versions=measurement_versions(),
    )


def _method_line(method: LineMethod, curve: Curve) -> MethodLine:
    return MethodLine(
        name=method.name,
        label=method.label,
        settings=method.settings,
        objective=method.objective,
        **vars(curve.to_record()),
    )


def model_record(model: Model) -> ModelRecord:
    """Identify a checkpoint for result files."""
    return ModelRecord(
        where=model.where,
        architecture=model.spec.architecture,
        parameters=model.parameters,
        sha256=model.digest(),
    )


def measurement_versions() -> dict[str, str]:
    """Versions of the libraries that can change a measurement."""
    return {
        **installed_versions(),
        "scikit-learn": version("scikit-learn"),
        "python": platform.python_version(),
    }


def combine_pairs(pairs: Sequence[CurveFile]) -> CurvesFile:
    """Combine pairs: mean and standard error of every barrier and every point."""
    kinds = {(pair.task.name, tuple(m.name for m in pair.methods), pair.ts) for pair in pairs}
    if len(kinds) != 1:
        raise MismatchError(
            f"{len(pairs)} pairs with {len(kinds)} kinds of curves:"
            " run all with the same task, methods and points"
        )
    lines = zip(*(pair.methods for pair in pairs), strict=True)
    metrics = pairs[0].task.metrics
    return CurvesFile(
        pairs=tuple(pairs),
        summary={of_pairs[0].name: _method_means(of_pairs, metrics) for of_pairs in lines},
    )


def _method_means(lines: Sequence[MethodLine], metrics: Iterable[str]) -> MethodMeans:
    places = zip(*(line.points for line in lines), strict=True)
    return MethodMeans(
        barrier_mean=Estimate.of([line.barrier_mean for line in lines]),
        barrier_linear=Estimate.of([line.barrier_linear for line in lines]),
        points=tuple(
            MeanPoint(place[0].t, mean_metrics([point.metrics for point in place], metrics))
            for place in places
        ),
    )


def mean_metrics(pairs: Sequence[Metrics], metrics: Iterable[str]) -> dict[str, Estimate]:
    """Mean and standard error of each metric over pairs."""
    return {metric: Estimate.of([one[metric] for one in pairs]) for metric in metrics}


def write_curves(curves: CurveFile | CurvesFile, folder: Path) -> None:
    """Write curve.json, and curve.csv: a row per pair, method and point; the ensemble has no t."""
    curves.write(folder / "curve.json")
    pairs = curves.pairs if isinstance(curves, CurvesFile) else (curves,)
    columns = ["pair", "method", "t", *pairs[0].task.metrics]
    with open(folder / "curve.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, columns, lineterminator="\n")
        rows.writeheader()
        for number, pair in enumerate(pairs):
            for method in pair.methods:
                rows.writerows(
                    {"pair": number, "method": method.name, **point.to_json()}
                    for point in method.points
                )
            rows.writerow({"pair": number, "method": "ensemble", **(pair.ensemble or {})})
