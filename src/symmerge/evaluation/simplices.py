"""Loss over what lies between several models: every line, the mean of more and more of them, the triangle of the first three.

Nothing is aligned here; give it aligned models.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from symmerge.checkpoints.files import write_json
from symmerge.errors import MismatchError
from symmerge.evaluation.lines import Curve, about, line, measured_with
from symmerge.evaluation.mixture import Mixture, Numbers, Shares, evaluate
from symmerge.evaluation.planes import Corners, laid_out
from symmerge.evaluation.planes import simplex as grid
from symmerge.evaluation.tasks import Task
from symmerge.models.model import Model, Progress

SCHEMA = "symmerge.simplex/1"
POINTS, STEPS = (
    5,
    12,
)  # of a line, along a side of the triangle: the grid has the points of its edges and its middle, which are then measured once


@dataclass(frozen=True)
class Simplex:
    """Loss and metrics `at` every place; a place has one share per model. The ensemble is of all of them."""

    count: int
    ts: tuple[float, ...]
    steps: int
    at: Mapping[Shares, Numbers]
    corners: Corners
    ensemble: Numbers

    @property
    def ends(self) -> list[Numbers]:
        """Of every model."""
        return [self.at[shares(self.count, {number: 1.0})] for number in range(self.count)]

    def line(self, a: int, b: int) -> Curve:
        """Between two of them."""
        return Curve(
            self.ts, tuple(self.at[shares(self.count, {a: 1 - t, b: t})] for t in self.ts), {}
        )

    @property
    def barriers(self) -> list[list[float]]:
        """Between every two, over the mean of the two."""
        found = [[0.0] * self.count for _ in range(self.count)]
        for a, b in combinations(range(self.count), 2):
            found[a][b] = found[b][a] = self.line(a, b).barrier_mean
        return found

    def mean(self, count: int) -> Numbers:
        """Of the mean of the first `count` models."""
        return self.at[first(self.count, count)]

    def barrier(self, count: int) -> float:
        """How far the loss of that mean lies over the mean loss of these models."""
        return (
            self.mean(count)["loss"] - sum(numbers["loss"] for numbers in self.ends[:count]) / count
        )

    def record(self) -> dict[str, Any]:
        """For simplex.json."""
        triangle = [
            {"weights": list(three), **self.at[_of_all(three, self.count)]}
            for three in grid(self.steps)
        ]
        return {
            "ends": [dict(numbers) for numbers in self.ends],
            "lines": [
                {"a": a, "b": b, **self.line(a, b).record()}
                for a, b in combinations(range(self.count), 2)
            ],
            "barriers": self.barriers,
            "means": [
                {"count": count, **self.mean(count), "barrier": self.barrier(count)}
                for count in range(2, self.count + 1)
            ],
            "triangle": {"corners": [list(corner) for corner in self.corners], "points": triangle},
            "ensemble": dict(self.ensemble),
        }


def shares(count: int, given: Mapping[int, float]) -> Shares:
    """One share per model; who is not given has none.

    >>> shares(4, {0: 0.25, 2: 0.75})
    (0.25, 0.0, 0.75, 0.0)
    """
    return tuple(given.get(number, 0.0) for number in range(count))


def first(count: int, merged: int) -> Shares:
    """The mean of the first few of `count` models."""
    return shares(count, dict.fromkeys(range(merged), 1 / merged))


def _of_all(three: Shares, count: int) -> Shares:
    return three + (0.0,) * (count - 3)


def places(count: int, points: int = POINTS, steps: int = STEPS) -> tuple[Shares, ...]:
    """Every place that is measured, each once.

    >>> len(places(3)), len(places(4)), len(places(3, points=2, steps=1))
    (91, 102, 5)
    """
    if count < 3:
        raise MismatchError(
            f"{count} models: a triangle has three corners; give three models or more, or measure the line between two with barrier"
        )
    ends = [shares(count, {number: 1.0}) for number in range(count)]
    lines = [
        shares(count, {a: 1 - t, b: t})
        for a, b in combinations(range(count), 2)
        for t in line(points)
    ]
    means = [first(count, merged) for merged in range(2, count + 1)]
    return tuple(
        dict.fromkeys([*ends, *lines, *means, *(_of_all(three, count) for three in grid(steps))])
    )


def measure(
    models: Sequence[Model],
    task: Task,
    *,
    points: int = POINTS,
    steps: int = STEPS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Simplex:
    """Every place in one pass over the data: `measure(align_many([a, b, c]).models, task).barriers`.

    One copy of the weights more than there are models is in memory.
    """
    every = places(len(models), points, steps)
    mixture = Mixture(models, device=device)
    found, ensemble = evaluate(mixture, task, every, progress=progress)
    return Simplex(
        len(models),
        line(points),
        steps,
        dict(zip(every, found, strict=True)),
        laid_out(mixture.products()),
        ensemble,
    )


@dataclass(frozen=True)
class SimplexMethod:
    """One way to bring all models together: where they lie then, in the order given, and how it was `found`, as solution.json of many models has it."""

    name: str
    label: str
    models: Sequence[Model]
    found: Mapping[str, Any] | None = None


def run(
    models: Sequence[Model],
    methods: Sequence[SimplexMethod],
    task: Task,
    *,
    points: int = POINTS,
    steps: int = STEPS,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Every method, measured over the same places, as simplex.json has it. `models` are those that were given, as they are."""
    for method in methods:
        if len(method.models) != len(models):
            raise MismatchError(
                f"{method.name} brought {len(method.models)} of {len(models)} models together: only the same models can be compared"
            )
    found = [
        measure(method.models, task, points=points, steps=steps, device=device, progress=progress)
        for method in methods
    ]
    return {
        "schema": SCHEMA,
        "task": task.record(),
        "models": [about(model) for model in models],
        "methods": [
            {
                "name": method.name,
                "label": method.label,
                **one.record(),
                "universe": dict(method.found) if method.found else None,
            }
            for method, one in zip(methods, found, strict=True)
        ],
        "versions": measured_with(),
    }


def write(record: Mapping[str, Any], folder: Path) -> None:
    """simplex.json, and simplex.csv with a row per method and place: the share of every model there, and what was measured; the ensemble has no shares."""
    write_json(folder / "simplex.json", record)
    metrics = record["task"]["metrics"]
    with open(folder / "simplex.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(
            [
                "method",
                "part",
                *(f"share {number}" for number in range(len(record["models"]))),
                *metrics,
            ]
        )
        for method in record["methods"]:
            rows.writerows(
                [method["name"], part, *where, *(numbers[metric] for metric in metrics)]
                for part, where, numbers in _rows(method)
            )


def _rows(method: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[float | None], Numbers]]:
    """What was measured: its part, where, and the numbers."""
    count = len(method["ends"])
    yield from (
        ("end", shares(count, {number: 1.0}), numbers)
        for number, numbers in enumerate(method["ends"])
    )
    for between in method["lines"]:
        yield from (
            ("line", shares(count, {between["a"]: 1 - point["t"], between["b"]: point["t"]}), point)
            for point in between["points"]
        )
    yield from (("mean", first(count, mean["count"]), mean) for mean in method["means"])
    yield from (
        ("triangle", _of_all(tuple(point["weights"]), count), point)
        for point in method["triangle"]["points"]
    )
    yield "ensemble", [None] * count, method["ensemble"]
