"""Tables of the page: what each cell says, and the value it sorts by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symmerge.evaluation.estimates import Estimate
from symmerge.report.phrases import estimate, position, short
from symmerge.report.results import CurveSummary, number


@dataclass(frozen=True)
class TableCell:
    """What is shown; numbers also carry what they sort by."""

    text: str
    value: float | None = None

    @staticmethod
    def of(value: Any) -> TableCell:
        """A measure, a count, a word, or nothing."""
        if isinstance(value, Estimate):
            return TableCell(estimate(value), value.mean)
        if isinstance(value, float):
            return TableCell(short(value), value)
        if isinstance(value, int):
            return TableCell(f"{value:,}", float(value))
        return TableCell("" if value is None else str(value))


@dataclass(frozen=True)
class PageTable:
    """Rows under named columns; `numeric` columns are set to the right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]

    @staticmethod
    def of(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> PageTable:
        """From plain values."""
        return PageTable(
            caption,
            tuple(columns),
            tuple(tuple(TableCell.of(value) for value in row) for row in rows),
        )

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether a column holds numbers."""
        return tuple(
            any(row[at].value is not None for row in self.rows) for at in range(len(self.columns))
        )


def as_given(value: Any) -> str:
    """A setting, as its file has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


MEAN, LINEAR = "barrier over the mean", "barrier over the line"


def barriers(curve: CurveSummary) -> PageTable:
    """Every method with both barriers and the even average's metrics; the parents and their ensemble to compare."""
    at = position(curve.t[curve.middle])
    rows = [
        [
            method.label,
            method.barrier_mean,
            method.barrier_linear,
            *_metrics(curve, method.points[curve.middle]),
        ]
        for method in curve.methods
    ]
    ends = curve.methods[0].points
    rows += [
        ["model A alone", None, None, *_metrics(curve, ends[0])],
        ["model B alone", None, None, *_metrics(curve, ends[-1])],
    ]
    if curve.ensemble:
        rows.append(["ensemble of both", None, None, *_metrics(curve, curve.ensemble)])
    return PageTable.of(
        f"Barriers, and every metric of the model merged at t = {at}",
        ["method", MEAN, LINEAR, *curve.metrics],
        rows,
    )


def points(curve: CurveSummary) -> PageTable:
    """Every number of the curve."""
    rows = [
        [Estimate(t), method.label, *_metrics(curve, point)]
        for method in curve.methods
        for t, point in zip(curve.t, method.points, strict=True)
    ]
    return PageTable.of("Every point of every method", ["t", "method", *curve.metrics], rows)


Row = tuple[str, Estimate, Estimate]
"""A method with both barriers."""


def overview(sections: Mapping[str, Sequence[Row]]) -> PageTable:
    """The barriers of every section."""
    return PageTable.of(
        "Barriers of every experiment",
        ["experiment", "method", MEAN, LINEAR],
        [[title, *row] for title, rows in sections.items() for row in rows],
    )


def models(curve: CurveSummary) -> PageTable:
    """Which files were merged."""
    many = len(curve.pairs) > 1
    rows = [
        [
            f"{at}: {letter.upper()}" if many else letter.upper(),
            *(pair[letter][key] for key in ("where", "architecture", "parameters", "sha256")),
        ]
        for at, pair in enumerate(curve.pairs, 1)
        for letter in ("a", "b")
    ]
    return PageTable.of(
        "Models",
        ["pair and model" if many else "model", "where", "architecture", "parameters", "sha256"],
        rows,
    )


def settings(curve: CurveSummary) -> PageTable | None:
    """How each method was set."""
    rows = [
        [method.label, key, as_given(value)]
        for method in curve.methods
        for key, value in method.settings.items()
    ]
    return (
        PageTable.of("Settings of the methods", ["method", "setting", "value"], rows)
        if rows
        else None
    )


def by_space(solution: Mapping[str, Any]) -> PageTable:
    """Where the rest of the objective lies."""
    rows = [[space, number(value)] for space, value in solution["by_space"].items()]
    return PageTable.of(
        "What is left of the objective, by space: a tensor counts for every space that it touches",
        ["space", "objective"],
        rows,
    )


def spaces(structure: Mapping[str, Any]) -> PageTable:
    """What the alignment does in every space."""
    rows = [
        [space["space"], space["group"], space["kind"], space["size"], space.get("blocks", 1)]
        for space in structure["spaces"]
    ]
    return PageTable.of(
        "The element found in every space", ["space", "group", "kind", "size", "blocks"], rows
    )


def correlations(results: Mapping[str, Any]) -> PageTable:
    """Feature correlation per layer."""
    rows = [
        [row["layer"], row["space"], number(row["before"]), number(row["after"])]
        for row in results["layers"]
    ]
    return PageTable.of(
        "Mean correlation of matched features", ["layer", "space", "before", "after"], rows
    )


def amount(results: Mapping[str, Any]) -> PageTable:
    """The barrier of every method at every amount of data."""
    rows = [
        [
            method["label"],
            point["samples"],
            Estimate.of([number(value) for value in point["barriers"]]),
            len(point["barriers"]),
        ]
        for method in results["methods"]
        for point in method["points"]
    ]
    return PageTable.of(
        "Barrier against amount of data", ["method", results["unit"], MEAN, "pairs"], rows
    )


def facts(curve: CurveSummary) -> Iterator[tuple[str, str]]:
    """How it was measured, as names and values."""
    yield from task_facts(curve.task, curve.metrics)
    yield "points", f"{len(curve.t)}, from t = {position(curve.t[0])} to {position(curve.t[-1])}"
    yield "pairs", str(len(curve.pairs))
    yield "versions", listed(curve.versions)


def task_facts(task: Mapping[str, Any], metrics: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What was measured, on what."""
    yield from (
        ("task" if key == "name" else key, as_given(value))
        for key, value in task.items()
        if key != "metrics"
    )
    yield "metrics", ", ".join(metrics)


def listed(versions: Mapping[str, str]) -> str:
    """Names and versions in a line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _metrics(curve: CurveSummary, values: Mapping[str, Estimate]) -> list[Estimate]:
    return [values[metric] for metric in curve.metrics]
