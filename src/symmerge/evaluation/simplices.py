"""Loss between several models: all lines, means of the first k, a triangle (simplex.json).

Nothing is aligned here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from symmerge.errors import MismatchError
from symmerge.evaluation.lines import Curve, even_steps, measurement_versions, model_record
from symmerge.evaluation.mixture import Mixture, Shares, evaluate_mixture
from symmerge.evaluation.planes import layout_corners, triangle_grid
from symmerge.evaluation.results import (
    Corners,
    MeanOfFirst,
    Metrics,
    PairLine,
    PlanePoint,
    PlaneRecord,
    SimplexFile,
    SimplexRecord,
)
from symmerge.evaluation.tasks import Task
from symmerge.models.alignment_results import UniverseFile
from symmerge.models.model import Model
from symmerge.models.progress import Progress

# Chosen so that the triangle's edges coincide with points of the lines and are measured once.
POINTS, STEPS = 5, 12  # on a line; along a side of the triangle


@dataclass(frozen=True)
class Simplex:
    """Metrics `at` every place (a weight per model), and of the ensemble of all models."""

    count: int
    ts: tuple[float, ...]
    steps: int
    at: Mapping[Shares, Metrics]
    corners: Corners
    ensemble: Metrics

    @property
    def ends(self) -> list[Metrics]:
        """Metrics of every model."""
        return [self.at[shares(self.count, {number: 1.0})] for number in range(self.count)]

    def line(self, a: int, b: int) -> Curve:
        """The line between two of the models."""
        places = [shares(self.count, {a: 1 - t, b: t}) for t in self.ts]
        return Curve(self.ts, tuple(self.at[place] for place in places), {})

    @property
    def barriers(self) -> list[list[float]]:
        """Matrix of the barriers of all pairs, over the mean of the two ends."""
        matrix = [[0.0] * self.count for _ in range(self.count)]
        for a, b in combinations(range(self.count), 2):
            matrix[a][b] = matrix[b][a] = self.line(a, b).barrier_mean
        return matrix

    def mean(self, count: int) -> Metrics:
        """Metrics of the mean of the first `count` models."""
        return self.at[mean_of_first(self.count, count)]

    def barrier(self, count: int) -> float:
        """Loss of the mean of the first `count` models, minus their mean loss."""
        losses = [metrics["loss"] for metrics in self.ends[:count]]
        return self.mean(count)["loss"] - sum(losses) / count

    def to_record(self, method: SimplexMethod) -> SimplexRecord:
        """For simplex.json."""
        pairs = combinations(range(self.count), 2)
        return SimplexRecord(
            name=method.name,
            label=method.label,
            ends=tuple(self.ends),
            lines=tuple(PairLine(a=a, b=b, **vars(self.line(a, b).to_record())) for a, b in pairs),
            barriers=tuple(map(tuple, self.barriers)),
            means=tuple(
                MeanOfFirst(count, self.barrier(count), self.mean(count))
                for count in range(2, self.count + 1)
            ),
            triangle=self._triangle(),
            ensemble=self.ensemble,
            universe=method.universe,
        )

    def _triangle(self) -> PlaneRecord:
        places = triangle_grid(self.steps)
        points = (PlanePoint(three, self.at[_pad(three, self.count)]) for three in places)
        return PlaneRecord(self.corners, tuple(points))


def shares(count: int, weights: Mapping[int, float]) -> Shares:
    """A weight per model; models that are not named have weight zero.

    >>> shares(4, {0: 0.25, 2: 0.75})
    (0.25, 0.0, 0.75, 0.0)
    """
    return tuple(weights.get(number, 0.0) for number in range(count))


def mean_of_first(count: int, merged: int) -> Shares:
    """Weights of the mean of the first `merged` of `count` models."""
    return shares(count, dict.fromkeys(range(merged), 1 / merged))


def _pad(three: Shares, count: int) -> Shares:
    return three + (0.0,) * (count - 3)


def simplex_places(count: int, points: int = POINTS, steps: int = STEPS) -> tuple[Shares, ...]:
    """Every place to measure, each once.

    >>> [len(places) for places in (simplex_places(3), simplex_places(4), simplex_places(3, 2, 1))]
    [91, 102, 5]
    """
    if count < 3:
        raise MismatchError(
            f"{count} models: a triangle has three corners; give three or more models, or measure"
            " the line between two with barrier"
        )
    ends = [shares(count, {number: 1.0}) for number in range(count)]
    pairs = combinations(range(count), 2)
    lines = [shares(count, {a: 1 - t, b: t}) for a, b in pairs for t in even_steps(points)]
    means = [mean_of_first(count, merged) for merged in range(2, count + 1)]
    triangle = [_pad(three, count) for three in triangle_grid(steps)]
    return tuple(dict.fromkeys([*ends, *lines, *means, *triangle]))


def measure_simplex(
    models: Sequence[Model],
    task: Task,
    *,
    points: int = POINTS,
    steps: int = STEPS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Simplex:
    """Measure every place, in one pass over the data.

    `measure_simplex(align_many([a, b, c]).models, task).barriers`
    The weights of all models and of one mixture are in memory.
    """
    places = simplex_places(len(models), points, steps)
    mixture = Mixture(models, device=device)
    metrics, ensemble = evaluate_mixture(mixture, task, places, progress=progress)
    return Simplex(
        len(models),
        even_steps(points),
        steps,
        dict(zip(places, metrics, strict=True)),
        layout_corners(mixture.products()),
        ensemble,
    )


@dataclass(frozen=True)
class SimplexMethod:
    """One way to align all models: the aligned models, in order, and the evidence."""

    name: str
    label: str
    models: Sequence[Model]
    universe: UniverseFile | None = None


def measure_methods(
    models: Sequence[Model],
    methods: Sequence[SimplexMethod],
    task: Task,
    *,
    points: int = POINTS,
    steps: int = STEPS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> SimplexFile:
    """Measure every method at the same places. `models` are the original ones."""
    for method in methods:
        if len(method.models) != len(models):
            raise MismatchError(
                f"{method.name} brought {len(method.models)} of {len(models)} models together:"
                " only the same models can be compared"
            )
    simplices = [
        measure_simplex(
            method.models, task, points=points, steps=steps, device=device, progress=progress
        )
        for method in methods
    ]
    return SimplexFile(
        task=task.to_record(),
        models=tuple(map(model_record, models)),
        methods=tuple(map(Simplex.to_record, simplices, methods)),
        versions=measurement_versions(),
    )


def write_simplex(simplex: SimplexFile, folder: Path) -> None:
    """Write simplex.json, and simplex.csv with a row per method and place.

    A row has the weight of every model and the metrics; the ensemble has no weights.
    """
    simplex.write(folder / "simplex.json")
    metrics, numbers = simplex.task.metrics, range(len(simplex.models))
    with open(folder / "simplex.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["method", "part", *(f"share {number}" for number in numbers), *metrics])
        for method in simplex.methods:
            rows.writerows(
                [method.name, part, *place, *(values[metric] for metric in metrics)]
                for part, place, values in _csv_rows(method)
            )


def _csv_rows(
    method: SimplexRecord,
) -> Iterator[tuple[str, Sequence[float | None], Metrics]]:
    """Rows of (part, weights, metrics); the part is end, line, mean, triangle or ensemble."""
    count = len(method.ends)
    for number, metrics in enumerate(method.ends):
        yield "end", shares(count, {number: 1.0}), metrics
    for line in method.lines:
        for point in line.points:
            yield "line", shares(count, {line.a: 1 - point.t, line.b: point.t}), point.metrics
    for mean in method.means:
        yield "mean", mean_of_first(count, mean.count), mean.metrics
    for corner in method.triangle.points:
        yield "triangle", _pad(corner.weights, count), corner.metrics
    yield "ensemble", [None] * count, method.ensemble
