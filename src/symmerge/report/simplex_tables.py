"""Tables of several models that were brought together, from simplex.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from symmerge.evaluation.estimates import Estimate
from symmerge.report.phrases import names
from symmerge.report.results import number
from symmerge.report.tables import PageTable, Row, as_given, listed, task_facts

Matrix = Sequence[Sequence[float | None]]
"""A number for every two models."""


def barriers(record: Mapping[str, Any]) -> PageTable:
    """Every method with its barriers and the metrics of all models merged; each model and their ensemble to compare."""
    metrics, count, methods = record["task"]["metrics"], len(record["models"]), record["methods"]
    rows = [
        [
            method["label"],
            *_over_pairs(method["barriers"]),
            number(method["means"][-1]["barrier"]),
            *_of(metrics, method["means"][-1]),
        ]
        for method in methods
    ]
    rows += [
        [f"{name} alone", None, None, None, *_of(metrics, numbers)]
        for name, numbers in zip(names(record["models"]), methods[0]["ends"], strict=True)
    ]
    rows.append(
        [f"ensemble of all {count}", None, None, None, *_of(metrics, methods[0]["ensemble"])]
    )
    columns = [
        "method",
        "mean barrier of a pair",
        "largest of a pair",
        f"barrier of all {count} merged",
        *metrics,
    ]
    return PageTable.of(f"Barriers, and every metric of all {count} models merged", columns, rows)


def overview(record: Mapping[str, Any]) -> tuple[Row, ...]:
    """Every method with both barriers, over the pairs."""
    return tuple(
        (
            method["label"],
            _over(method["lines"], "barrier_mean"),
            _over(method["lines"], "barrier_linear"),
        )
        for method in record["methods"]
    )


def _over(lines: Sequence[Mapping[str, Any]], barrier: str) -> Estimate:
    return Estimate.of([number(line[barrier]) for line in lines])


def pairs(names: Sequence[str], methods: Sequence[tuple[str, Matrix]]) -> PageTable:
    """The barrier between every two models, by every method."""
    rows = [
        [names[a], names[b], *(number(barriers[a][b]) for _, barriers in methods)]
        for a, b in combinations(range(len(names)), 2)
    ]
    return PageTable.of(
        "Barrier over the mean, between every two models",
        ["from", "to", *(label for label, _ in methods)],
        rows,
    )


def by_count(record: Mapping[str, Any]) -> PageTable:
    """The barrier of more and more models merged, by every method."""
    rows = zip(
        *([number(mean["barrier"]) for mean in method["means"]] for method in record["methods"]),
        strict=True,
    )
    caption = "Barrier of the mean of the first models"
    return PageTable.of(
        caption,
        ["models merged", *(method["label"] for method in record["methods"])],
        [[count, *row] for count, row in enumerate(rows, 2)],
    )


def universes(record: Mapping[str, Any]) -> PageTable | None:
    """How each method brought the models together."""
    rows = [
        [method["label"], *_search(method["universe"])]
        for method in record["methods"]
        if method["universe"]
    ]
    columns = [
        "method",
        "spread, aligned to one",
        "spread at the end",
        "rounds",
        "rounds that moved any",
        "moves in all",
        "cycle error",
    ]
    return PageTable.of("The search for common coordinates", columns, rows) if rows else None


def _search(found: Mapping[str, Any]) -> list[float | int]:
    spreads, moved = [number(spread) for spread in found["spreads"]], found["moved"]
    return [
        spreads[0],
        spreads[-1],
        len(moved),
        sum(map(bool, moved)),
        sum(moved),
        number(found["cycle_error"]),
    ]


def models(found: Sequence[Mapping[str, Any]]) -> PageTable:
    """Which files were merged."""
    keys = ("where", "architecture", "parameters", "sha256")
    return PageTable.of(
        "Models",
        ["model", *keys],
        [
            [name, *(model[key] for key in keys)]
            for name, model in zip(names(found), found, strict=True)
        ],
    )


def settings(record: Mapping[str, Any]) -> PageTable | None:
    """How each method was set."""
    given = [
        (method["label"], method["universe"]["settings"])
        for method in record["methods"]
        if method["universe"]
    ]
    rows = [[label, *setting] for label, found in given for setting in _flat(found)]
    return (
        PageTable.of("Settings of the methods", ["method", "setting", "value"], rows)
        if rows
        else None
    )


def _flat(settings: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, str]]:
    """Settings inside settings, by their whole names."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", as_given(value)


def facts(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How it was measured, as names and values."""
    first = record["methods"][0]
    yield from task_facts(record["task"], record["task"]["metrics"])
    yield "models", str(len(record["models"]))
    yield "methods", ", ".join(method["label"] for method in record["methods"])
    yield (
        "points",
        f"{len(first['lines'][0]['points'])} on each of {len(first['lines'])} lines, {len(first['triangle']['points'])} on the triangle",
    )
    yield "versions", listed(record["versions"])


def _over_pairs(barriers: Matrix) -> tuple[float, float]:
    """Mean and largest."""
    found = [number(barriers[a][b]) for a, b in combinations(range(len(barriers)), 2)]
    return sum(found) / len(found), max(found)


def _of(metrics: Sequence[str], values: Mapping[str, Any]) -> list[float]:
    return [number(values[metric]) for metric in metrics]
