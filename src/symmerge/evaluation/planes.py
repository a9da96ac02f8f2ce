"""Loss on the plane through three models: inside their triangle and a margin around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from symmerge.checkpoints.card import versions
from symmerge.errors import MismatchError
from symmerge.evaluation.mixture import Mixture, Numbers, Shares, evaluate
from symmerge.evaluation.tasks import Task
from symmerge.models.model import Model, Progress

SCHEMA = "symmerge.plane/1"
Corners = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Plane:
    """Loss and metrics at every place. `corners` is where the models lie on the plane, in units of the weights' distance."""

    corners: Corners
    places: tuple[Shares, ...]
    points: tuple[Numbers, ...]
    ensemble: Numbers

    def record(self, task: Task) -> dict[str, Any]:
        """For plane.json. A place lies at the weighted mean of the corners."""
        rows = [
            {"weights": list(place), **numbers}
            for place, numbers in zip(self.places, self.points, strict=True)
        ]
        corners = [list(corner) for corner in self.corners]
        return {
            "schema": SCHEMA,
            "task": task.record(),
            "corners": corners,
            "points": rows,
            "ensemble": dict(self.ensemble),
            "versions": versions(),
        }


def simplex(steps: int, margin: float = 0.0) -> tuple[Shares, ...]:
    """Weights of three models on an even grid: the triangle, and around it as far as a weight of `-margin`.

    >>> simplex(1)
    ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
    """
    if steps < 1 or margin < 0:
        raise MismatchError(
            f"steps {steps}, margin {margin:g}: a grid has at least one step, and its margin is not negative"
        )
    out = round(margin * steps)
    counts = ((i, j, steps - i - j) for i, j in product(range(-out, steps + 2 * out + 1), repeat=2))
    return tuple((i / steps, j / steps, k / steps) for i, j, k in counts if k >= -out)


def plane(
    models: Sequence[Model],
    task: Task,
    *,
    steps: int = 10,
    margin: float = 0.2,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Plane:
    """Every place of the grid in one pass over the data. Four copies of the weights are in memory: the three models and the mean."""
    if len(models) != 3:
        raise MismatchError(f"{len(models)} models: a plane goes through three")
    places = simplex(steps, margin)
    mixture = Mixture(models, device=device)
    points, ensemble = evaluate(mixture, task, places, progress=progress)
    return Plane(laid_out(mixture.products()), places, tuple(points), ensemble)


def laid_out(products: list[list[float]]) -> Corners:
    """Where three models lie on their plane, by the inner products of their differences: the first model in the origin, the second on the axis, the third above it."""
    along = math.sqrt(products[1][1])
    x = products[1][2] / along if along else 0.0
    return (0.0, 0.0), (along, 0.0), (x, math.sqrt(max(products[2][2] - x * x, 0.0)))
