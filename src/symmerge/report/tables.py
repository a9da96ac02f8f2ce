"""Tables of the page: the text of each cell, and the value it sorts by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.experiment_results import AmountFile
from symmerge.evaluation.results import ModelRecord, TaskRecord
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.models.alignment_results import SolutionFile
from symmerge.models.structure import StructureFile
from symmerge.observation.correlations import Correlations
from symmerge.report.phrases import (
    data_name,
    estimate_text,
    metric_text,
    number_text,
    position_text,
)
from symmerge.report.results import PLAIN, ROLES, CurveSummary

CellValue = Estimate | float | int | str | None
OVER_MEAN, OVER_LINE = "barrier over the mean", "barrier over the line"


@dataclass(frozen=True)
class TableCell:
    """The text of a cell; numbers also have a sort key."""

    text: str
    value: float | None = None

    @staticmethod
    def of(value: CellValue) -> TableCell:
        """A measurement, a count, a text, or nothing."""
        if isinstance(value, Estimate):
            return TableCell(estimate_text(value), value.mean)
        if isinstance(value, float):
            return TableCell(number_text(value), value)
        if isinstance(value, int):
            return TableCell(f"{value:,}", float(value))
        return TableCell("" if value is None else value)


@dataclass(frozen=True)
class PageTable:
    """Rows under named columns; `numeric` columns are right-aligned."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    roles: tuple[str, ...] = ()  # of the rows: best, plain, rest, parent or ensemble
    mark: str = ""  # beside the best

    @staticmethod
    def of(caption: str, columns: Sequence[str], rows: Sequence[Sequence[CellValue]]) -> PageTable:
        """From plain values."""
        cells = tuple(tuple(map(TableCell.of, row)) for row in rows)
        return PageTable(caption, tuple(columns), cells)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether a column holds numbers."""
        columns = range(len(self.columns))
        return tuple(any(row[at].value is not None for row in self.rows) for at in columns)


@dataclass(frozen=True)
class BarrierRow:
    """A method with both barriers, for the overview of several sections."""

    label: str
    barrier_mean: Estimate
    barrier_linear: Estimate


def setting_text(value: object) -> str:
    """A setting as it is written in its file."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def curve_table(curve: CurveSummary) -> PageTable:
    """Metrics of every method at the midpoint, best first, then of the models and the ensemble."""
    best = curve.best
    rows: list[list[CellValue]] = [
        [m.label, *_metrics(curve, m.points[curve.midpoint]), m.barrier_mean] for m in curve.ranked
    ]
    roles = ["best" if m is best else "plain" if m.name == PLAIN else "rest" for m in curve.ranked]
    for letter, name, values in zip("AB", curve.names, curve.parents, strict=True):
        rows.append([f"{letter}: {name}", *_metrics(curve, values), None])
    if curve.ensemble:
        rows.append(["ensemble of both", *_metrics(curve, curve.ensemble), None])
    caption = "Every method and both models"
    table = PageTable.of(caption, ["method", *map(metric_text, curve.metrics), "barrier"], rows)
    return replace(table, roles=(*roles, *["parent"] * 2, "ensemble")[: len(rows)], mark="best")


def both_barriers(curve: CurveSummary) -> PageTable:
    """The barriers of every method by both definitions."""
    rows = [[m.label, m.barrier_mean, m.barrier_linear] for m in curve.ranked]
    return PageTable.of("Barriers, by both definitions", ["method", OVER_MEAN, OVER_LINE], rows)


def verdict_table(verdict: MergeVerdict) -> PageTable:
    """Parents, average, merge and ensemble, by every metric."""
    metrics = verdict.task.metrics
    rows = [[row.name, *(row.metrics.get(metric) for metric in metrics)] for row in verdict.rows]
    roles = tuple(ROLES[row.kind] for row in verdict.rows)
    columns = ["model", *map(metric_text, metrics)]
    return replace(
        PageTable.of(f"Measured on {data_name(verdict.task.data)}", columns, rows), roles=roles
    )


def curve_points(curve: CurveSummary) -> PageTable:
    """Every number of the curve."""
    rows = [
        [Estimate(t), method.label, *_metrics(curve, point)]
        for method in curve.methods
        for t, point in zip(curve.t, method.points, strict=True)
    ]
    return PageTable.of(
        "Every point of every method", ["t", "method", *map(metric_text, curve.metrics)], rows
    )


def overview(sections: Mapping[str, Sequence[BarrierRow]]) -> PageTable:
    """The barriers of every section."""
    return PageTable.of(
        "Barriers of every experiment",
        ["experiment", "method", OVER_MEAN, OVER_LINE],
        [
            [title, row.label, row.barrier_mean, row.barrier_linear]
            for title, rows in sections.items()
            for row in rows
        ],
    )


def pair_models(curve: CurveSummary) -> PageTable:
    """Which checkpoints were merged, pair by pair."""
    numbered = len(curve.pairs) > 1
    models = {
        f"{number}: {letter}" if numbered else letter: model
        for number, pair in enumerate(curve.pairs, 1)
        for letter, model in (("A", pair.a), ("B", pair.b))
    }
    return models_table("pair and model" if numbered else "model", models)


def models_table(heading: str, models: Mapping[str, ModelRecord]) -> PageTable:
    """Which checkpoints were merged."""
    rows = [
        [name, model.where, model.architecture, model.parameters, model.sha256]
        for name, model in models.items()
    ]
    return PageTable.of("Models", [heading, "where", "architecture", "parameters", "sha256"], rows)


def settings_table(settings: Mapping[str, Mapping[str, object]]) -> PageTable | None:
    """Settings of each method (label -> setting -> value), if any are known."""
    rows = [
        [label, name, setting_text(value)]
        for label, of_method in settings.items()
        for name, value in of_method.items()
    ]
    columns = ["method", "setting", "value"]
    return PageTable.of("Settings of the methods", columns, rows) if rows else None


def objective_by_space(solution: SolutionFile) -> PageTable:
    """The remaining objective, by space."""
    return PageTable.of(
        "What is left of the objective, by space: a tensor counts for every space that it touches",
        ["space", "objective"],
        [[space, value] for space, value in solution.by_space.items()],
    )


def spaces_table(structure: StructureFile) -> PageTable:
    """What the alignment does in every space."""
    rows = [
        [space.space, space.group, space.kind, space.size, space.blocks]
        for space in structure.spaces
    ]
    columns = ["space", "group", "kind", "size", "blocks"]
    return PageTable.of("The element found in every space", columns, rows)


def correlations_table(correlations: Correlations) -> PageTable:
    """Feature correlation per layer."""
    rows = [[row.layer, row.space, row.before, row.after] for row in correlations.layers]
    columns = ["layer", "space", "before", "after"]
    return PageTable.of("Mean correlation of matched features", columns, rows)


def amount_table(amount: AmountFile) -> PageTable:
    """The barrier of every method at every amount of data."""
    rows = [
        [method.label, point.samples, Estimate.of(point.barriers), len(point.barriers)]
        for method in amount.methods
        for point in method.points
    ]
    columns = ["method", amount.unit, OVER_MEAN, "pairs"]
    return PageTable.of("Barrier against amount of data", columns, rows)


def curve_facts(curve: CurveSummary) -> Iterator[tuple[str, str]]:
    """Facts about the measurement, as names and values."""
    yield from task_facts(curve.task, curve.metrics)
    start, end = position_text(curve.t[0]), position_text(curve.t[-1])
    yield "points", f"{len(curve.t)}, from t = {start} to {end}"
    yield "pairs", str(len(curve.pairs))
    yield "versions", versions_text(curve.versions)


def task_facts(task: TaskRecord, metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Facts about the task and its data."""
    yield "task", task.name
    yield "data", task.data
    yield "samples", str(task.samples)
    yield "seed", str(task.seed)
    yield from ((name, setting_text(value)) for name, value in task.settings.items())
    yield "metrics", ", ".join(metrics)


def versions_text(versions: Mapping[str, str]) -> str:
    """Names and versions on one line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _metrics(curve: CurveSummary, values: Mapping[str, Estimate]) -> list[CellValue]:
    return [values[metric] for metric in curve.metrics]
