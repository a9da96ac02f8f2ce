"""curve.json, simplex.json and plane.json: what was measured between models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Annotated

from symmerge.checkpoints.json_results import INLINE, OMIT, Record, ResultFile
from symmerge.evaluation.estimates import Estimate
from symmerge.models.alignment_results import UniverseFile

Metrics = Mapping[str, float]
"""Metric -> value; one of them is the loss."""
Corners = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class TaskRecord(Record):
    """What was measured."""

    name: Annotated[str, "`mlm`, `clm`, `seq2seq`, `image` or `text`."]
    data: Annotated[str, "Name of the data."]
    samples: Annotated[int, "How many samples were used."]
    seed: Annotated[int, "Seed of masks and of the choice of samples."]
    metrics: Annotated[tuple[str, ...], "Metrics that every point has; `loss` is one of them."]
    settings: Annotated[Mapping[str, object], INLINE, "Settings of the task."]


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """Which checkpoint a model is."""

    where: Annotated[str, "Folder or hub name."]
    architecture: Annotated[str, "Class of the model."]
    parameters: Annotated[int, "Number of parameters."]
    sha256: Annotated[str, "Hash of the weights and the config."]


@dataclass(frozen=True, kw_only=True)
class PairRecord(Record):
    """The two ends of a line."""

    a: Annotated[ModelRecord, "Model A, at t = 0."]
    b: Annotated[ModelRecord, "Model B, at t = 1."]


@dataclass(frozen=True)
class LinePoint(Record):
    """Metrics at one place of a line."""

    t: Annotated[float, "Share of model B; the same values for every method."]
    metrics: Annotated[Metrics, INLINE, "Value of each metric."]


@dataclass(frozen=True, kw_only=True)
class LineRecord(Record):
    """A line with its barriers."""

    points: Annotated[tuple[LinePoint, ...], "From model A to model B; at least two."]
    barrier_mean: Annotated[float, "The largest L(t) - (L(0) + L(1)) / 2."]
    barrier_linear: Annotated[float, "The largest L(t) - ((1 - t) L(0) + t L(1))."]
    over: Annotated[
        tuple[float, float] | None,
        OMIT,
        "Losses of the two models, which the barriers are taken over where the method is no",
        "symmetry, so that the ends of its line are other functions.",
    ] = None

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise ValueError("a curve needs two points or more")


@dataclass(frozen=True, kw_only=True)
class MethodLine(LineRecord):
    """The line of one method."""

    name: Annotated[str, "Name of the method; `none` is the plain average."]
    label: Annotated[str, "Its name for people."]
    settings: Annotated[Mapping[str, object], "Options of the solver."] = field(
        default_factory=dict
    )
    objective: Annotated[tuple[float, ...], "The solver's objective after each sweep."] = ()


@dataclass(frozen=True, kw_only=True)
class CurveFile(ResultFile):
    """Loss on the line between two models, by several methods."""

    SCHEMA, WRITER = "symmerge.curve/1", "symmerge barrier"

    task: Annotated[TaskRecord, "What was measured."]
    models: Annotated[PairRecord, "The two models."]
    methods: Annotated[tuple[MethodLine, ...], "A line per method."]
    ensemble: Annotated[Metrics | None, "Both models run, their predictions averaged."] = None
    versions: Annotated[Mapping[str, str], "Versions of what can change a number."]

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("it holds no curve")
        if len({_grid(method) for method in self.methods}) > 1:
            raise ValueError("the curves have different values of t")
        points = [point.metrics for method in self.methods for point in method.points]
        _check_metrics(self.task, points + ([self.ensemble] if self.ensemble else []))

    @property
    def ts(self) -> tuple[float, ...]:
        """Where each line was measured."""
        return _grid(self.methods[0])

    @property
    def ends(self) -> tuple[Metrics, Metrics]:
        """Metrics of both models; their losses alone where no method keeps their functions."""
        for method in self.methods:
            if method.over is None:
                return method.points[0].metrics, method.points[-1].metrics
        a, b = self.methods[0].over or (nan, nan)
        return {"loss": a}, {"loss": b}

    @property
    def main_metric(self) -> str | None:
        """What people look at beside the loss: perplexity, accuracy."""
        return next((name for name in self.task.metrics if name != "loss"), None)


def _check_metrics(task: TaskRecord, points: Iterable[Metrics]) -> None:
    missing = {"loss", *task.metrics} - set.intersection(*(set(point) for point in points))
    if missing:
        raise ValueError(f"some points have no {', '.join(sorted(missing))[:80]}")


def _grid(line: LineRecord) -> tuple[float, ...]:
    return tuple(point.t for point in line.points)


@dataclass(frozen=True)
class MeanPoint(Record):
    """One place of a line, over the pairs."""

    t: Annotated[float, "Share of model B."]
    metrics: Annotated[Mapping[str, Estimate], INLINE, "Mean and error of each metric."]


@dataclass(frozen=True, kw_only=True)
class MethodMeans(Record):
    """One method, over the pairs."""

    barrier_mean: Annotated[Estimate, "Mean and error of the barrier over the mean."]
    barrier_linear: Annotated[Estimate, "Mean and error of the barrier over the line."]
    points: Annotated[tuple[MeanPoint, ...], "Mean and error of every metric at every point."]


@dataclass(frozen=True, kw_only=True)
class CurvesFile(ResultFile):
    """Several pairs, measured in the same way."""

    SCHEMA, WRITER = "symmerge.curves/1", "symmerge barrier"

    pairs: Annotated[tuple[CurveFile, ...], "A `curve` per pair: same methods, metrics and t."]
    summary: Annotated[Mapping[str, MethodMeans], "Method -> its means, for other programs."]

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ValueError("it holds no curve")
        if len({tuple(method.name for method in pair.methods) for pair in self.pairs}) > 1:
            raise ValueError("the pairs were merged by different methods")
        if len({frozenset(pair.task.metrics) for pair in self.pairs}) > 1:
            raise ValueError("the pairs have different metrics")
        if len({pair.ts for pair in self.pairs}) > 1:
            raise ValueError("the curves have different values of t")


@dataclass(frozen=True, kw_only=True)
class PairLine(LineRecord):
    """The line between two of several models."""

    a: Annotated[int, "Number of the first model."]
    b: Annotated[int, "Number of the second; t is its share."]


@dataclass(frozen=True)
class MeanOfFirst(Record):
    """The mean of the first models."""

    count: Annotated[int, "How many models, from 2 to all."]
    barrier: Annotated[float, "Its loss, less the mean of these models' own losses."]
    metrics: Annotated[Metrics, INLINE, "Value of each metric."]


@dataclass(frozen=True)
class PlanePoint(Record):
    """One mixture of three models."""

    weights: Annotated[tuple[float, float, float], "Share of each model."]
    metrics: Annotated[Metrics, INLINE, "Value of each metric."]

    def __post_init__(self) -> None:
        # Written so that NaN fails, too.
        if not (abs(sum(self.weights) - 1) < 1e-3 and max(map(abs, self.weights)) < 1e3):
            raise ValueError("the shares of a mixture do not add up to 1")
        if "loss" not in self.metrics:
            raise ValueError("a mixture has no loss")


@dataclass(frozen=True)
class PlaneRecord(Record):
    """Mixtures of three models; a point lies at the weighted mean of the corners."""

    corners: Annotated[Corners, "Where the models lie, in units of the weights' distance."]
    points: Annotated[tuple[PlanePoint, ...], "Every mixture that was measured."]


@dataclass(frozen=True, kw_only=True)
class SimplexRecord(Record):
    """What lies between all models, brought together by one method."""

    name: Annotated[str, "Name of the method; `none` is the plain average."]
    label: Annotated[str, "Its name for people."]
    ends: Annotated[tuple[Metrics, ...], "Metrics of every model, in common coordinates."]
    lines: Annotated[tuple[PairLine, ...], "The line between every two models."]
    barriers: Annotated[tuple[tuple[float, ...], ...], "`barrier_mean` of every two, as a matrix."]
    means: Annotated[tuple[MeanOfFirst, ...], "The means of the first 2, 3, ... models."]
    triangle: Annotated[PlaneRecord, "Mixtures of the first three models."]
    ensemble: Annotated[Metrics, "All models run, their predictions averaged."]
    universe: Annotated[
        UniverseFile | None, "How the models were brought together; null for `none`."
    ]


@dataclass(frozen=True, kw_only=True)
class SimplexFile(ResultFile):
    """Loss between several models at once."""

    SCHEMA, WRITER = "symmerge.simplex/1", "symmerge barrier --together"

    task: Annotated[TaskRecord, "What was measured."]
    models: Annotated[tuple[ModelRecord, ...], "The models, numbered from 0; at least three."]
    methods: Annotated[tuple[SimplexRecord, ...], "What was measured, by method."]
    versions: Annotated[Mapping[str, str], "Versions of what can change a number."]

    def __post_init__(self) -> None:
        if not self.methods or len(self.models) < 3:
            raise ValueError("it holds no methods, or less than three models")


@dataclass(frozen=True, kw_only=True)
class PlaneFile(ResultFile):
    """Loss on the plane through three models."""

    SCHEMA, WRITER = "symmerge.plane/1", "symmerge.plane(...).to_file(task)"

    task: Annotated[TaskRecord, "What was measured."]
    corners: Annotated[Corners, "Where the models lie, in units of the weights' distance."]
    points: Annotated[tuple[PlanePoint, ...], "Every mixture that was measured."]
    ensemble: Annotated[Metrics, "All models run, their predictions averaged."]
    versions: Annotated[Mapping[str, str], "Versions of what can change a number."]
