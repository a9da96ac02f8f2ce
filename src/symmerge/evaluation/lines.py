"""Loss along the straight line between two models. Nothing is aligned here; give it aligned models."""

from __future__ import annotations

import csv
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from symmerge.checkpoints.card import versions
from symmerge.checkpoints.files import write_json
from symmerge.errors import MismatchError
from symmerge.evaluation.estimates import mean_and_error
from symmerge.evaluation.mixture import Mixture, Numbers, evaluate
from symmerge.evaluation.tasks import Task
from symmerge.models.model import Model, Progress

SCHEMA, SEVERAL = "symmerge.curve/1", "symmerge.curves/1"
BARRIERS = ("barrier_mean", "barrier_linear")


@dataclass(frozen=True)
class Curve:
    """Loss and metrics at every `t` from A (0) to B (1), and of the parents' ensemble: the mean of their predictions."""

    ts: tuple[float, ...]
    points: tuple[Numbers, ...]
    ensemble: Numbers

    parents: tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The losses that barriers are taken over: of the two ends, or of the `parents` where an end is another function than its parent."""
        return self.parents or (self.points[0]["loss"], self.points[-1]["loss"])

    @property
    def barrier_mean(self) -> float:
        """How far the largest loss lies over the mean of the two ends."""
        return max(point["loss"] for point in self.points) - sum(self.ends) / 2

    @property
    def barrier_linear(self) -> float:
        """How far the loss lies over the straight line between the two ends, where that is most."""
        a, b = self.ends
        return max(
            point["loss"] - ((1 - t) * a + t * b)
            for t, point in zip(self.ts, self.points, strict=True)
        )

    def record(self) -> dict[str, Any]:
        """For curve.json."""
        rows = [{"t": t, **numbers} for t, numbers in zip(self.ts, self.points, strict=True)]
        over = {} if self.parents is None else {"over": list(self.parents)}
        return {
            "points": rows,
            "barrier_mean": self.barrier_mean,
            "barrier_linear": self.barrier_linear,
            **over,
        }


def line(points: int) -> tuple[float, ...]:
    """Every t, evenly from A to B."""
    if points < 2:
        raise MismatchError(f"points {points}: a curve has at least two, its ends")
    return tuple(i / (points - 1) for i in range(points))


def barrier(
    a: Model,
    b: Model,
    task: Task,
    points: int = 21,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Curve:
    """Every point of the line in one pass over the data: `barrier(a, aligned, make_task("clm", "python-docs", [a]))`.

    Three copies of the weights are in memory: the two models and the one between them.
    """
    ts = line(points)
    found, ensemble = evaluate(
        Mixture([a, b], device=device), task, [(1 - t, t) for t in ts], progress=progress
    )
    return Curve(ts, tuple(found), ensemble)


@dataclass(frozen=True)
class LineMethod:
    """One way to bring a pair together: the two ends of its line, and how they were found. Not `exact`: its ends are other functions than the pair."""

    name: str
    label: str
    a: Model
    b: Model
    settings: Mapping[str, Any] = field(default_factory=dict)
    objective: tuple[float, ...] = ()
    exact: bool = True


def run(
    a: Model,
    b: Model,
    methods: Sequence[LineMethod],
    task: Task,
    *,
    points: int = 21,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The line of every method between two models, as curve.json has it. The ensemble is of the first method's ends."""
    curves = [
        barrier(method.a, method.b, task, points, device=device, progress=progress)
        for method in methods
    ]
    if not all(method.exact for method in methods):
        known = next(
            (curve for method, curve in zip(methods, curves, strict=True) if method.exact), None
        ) or barrier(a, b, task, 2, device=device)
        curves = [
            curve if method.exact else replace(curve, parents=known.ends)
            for method, curve in zip(methods, curves, strict=True)
        ]
    return {
        "schema": SCHEMA,
        "task": task.record(),
        "models": {"a": about(a), "b": about(b)},
        "methods": [
            {
                "name": method.name,
                "label": method.label,
                **curve.record(),
                "settings": dict(method.settings),
                "objective": list(method.objective),
            }
            for method, curve in zip(methods, curves, strict=True)
        ],
        "ensemble": dict(curves[0].ensemble),
        "versions": measured_with(),
    }


def about(model: Model) -> dict[str, Any]:
    """Which files a model is."""
    return {
        "where": model.where,
        "architecture": model.spec.architecture,
        "parameters": model.parameters,
        "sha256": model.digest(),
    }


def measured_with() -> dict[str, str]:
    """Versions of what can change a measure."""
    return {
        **versions(),
        "scikit-learn": version("scikit-learn"),
        "python": platform.python_version(),
    }


def several(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `run` gave for several pairs, together: mean and standard error of every barrier and at every point."""
    shapes = {_shape(pair) for pair in pairs}
    if len(shapes) != 1:
        raise MismatchError(
            f"{len(pairs)} pairs with {len(shapes)} kinds of curves: run all with the same task, methods and points"
        )
    return {
        "schema": SEVERAL,
        "pairs": [dict(pair) for pair in pairs],
        "summary": {name: _summary(pairs, at) for at, name in enumerate(next(iter(shapes))[1])},
    }


def _shape(pair: Mapping[str, Any]) -> tuple[Any, ...]:
    methods = pair["methods"]
    return (
        pair["task"]["name"],
        tuple(method["name"] for method in methods),
        tuple(point["t"] for method in methods for point in method["points"]),
    )


def _summary(pairs: Sequence[Mapping[str, Any]], at: int) -> dict[str, Any]:
    methods = [pair["methods"][at] for pair in pairs]
    metrics = pairs[0]["task"]["metrics"]
    rows = zip(*(method["points"] for method in methods), strict=True)
    points = [
        {"t": row[0]["t"], **{name: _mean(point[name] for point in row) for name in metrics}}
        for row in rows
    ]
    return {
        **{name: _mean(method[name] for method in methods) for name in BARRIERS},
        "points": points,
    }


def _mean(values: Iterable[float]) -> dict[str, float | None]:
    return dict(zip(("mean", "error"), mean_and_error(list(values)), strict=True))


def write(record: Mapping[str, Any], folder: Path) -> None:
    """curve.json, and curve.csv with a row per pair, method and point; the ensemble has no t."""
    write_json(folder / "curve.json", record)
    pairs = record.get("pairs", [record])
    with open(folder / "curve.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(
            file, ["pair", "method", "t", *pairs[0]["task"]["metrics"]], lineterminator="\n"
        )
        rows.writeheader()
        for number, pair in enumerate(pairs):
            for method in pair["methods"]:
                rows.writerows(
                    {"pair": number, "method": method["name"], **point}
                    for point in method["points"]
                )
            rows.writerow({"pair": number, "method": "ensemble", **pair["ensemble"]})
