"""Loss on the plane through three models (plane.json): their triangle and a margin around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from symmerge.checkpoints.versions import installed_versions
from symmerge.errors import MismatchError
from symmerge.evaluation.mixture import Mixture, evaluate_mixture
from symmerge.evaluation.results import Corners, Metrics, PlaneFile, PlanePoint
from symmerge.evaluation.tasks import Task
from symmerge.models.model import Model
from symmerge.models.progress import Progress

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Plane:
    """Metrics at every point; `corners` are the models' positions, in units of weight distance."""

    corners: Corners
    places: tuple[Triple, ...]
    points: tuple[Metrics, ...]
    ensemble: Metrics

    def to_file(self, task: Task) -> PlaneFile:
        """Content of plane.json. A point lies at the weighted mean of the corners."""
        return PlaneFile(
            task=task.to_record(),
            corners=self.corners,
            points=tuple(map(PlanePoint, self.places, self.points)),
            ensemble=self.ensemble,
            versions=installed_versions(),
        )


def triangle_grid(steps: int, margin: float = 0.0) -> tuple[Triple, ...]:
    """Weights of three models on an even grid: the triangle, and outside it down to `-margin`.

    >>> triangle_grid(1)
    ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0))
    """
    if steps < 1 or margin < 0:
        raise MismatchError(
            f"steps {steps}, margin {margin:g}: a grid needs at least one step, and its margin"
            " must not be negative"
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
    """Measure the grid in one pass over the data, with four copies of the weights in memory."""
    if len(models) != 3:
        raise MismatchError(f"{len(models)} models: a plane goes through three; give three")
    places = triangle_grid(steps, margin)
    mixture = Mixture(models, device=device)
    points, ensemble = evaluate_mixture(mixture, task, places, progress=progress)
    return Plane(layout_corners(mixture.products()), places, tuple(points), ensemble)


def layout_corners(products: list[list[float]]) -> Corners:
    """Positions of three models on their plane, from the inner products of their differences.

    The first is the origin, the second lies on the x axis, the third above it.
    """
    along = math.sqrt(products[1][1])
    x = products[1][2] / along if along else 0.0
    return (0.0, 0.0), (along, 0.0), (x, math.sqrt(max(products[2][2] - x * x, 0.0)))
