"""Results of an experiment: one JSON file, a page, and tables to print."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from symmerge import report as drawing  # the module: matplotlib is loaded when something is drawn
from symmerge.checkpoints.files import write_json
from symmerge.evaluation.estimates import Estimate
from symmerge.lab.experiments.cells import Result, with_needs
from symmerge.lab.experiments.runner import RunOutcome
from symmerge.lab.experiments.tables import (
    Experiment,
    ResultTable,
    Size,
    TableEntry,
    cells_of,
    values_of,
)
from symmerge.report.results import EXPERIMENT

RESULTS, PAGE = "results.json", "page.html"


def write_results(
    folder: Path,
    name: str,
    experiment: Experiment,
    size: Size,
    tables: tuple[ResultTable, ...],
    outcome: RunOutcome,
) -> dict[str, Any]:
    """Write `results.json` and its page. No times, no paths: the same cells give the same bytes."""
    record = {
        "schema": EXPERIMENT,
        "name": name,
        "about": experiment.about,
        "paper": experiment.paper,
        "size": {
            "name": size.name,
            "seeds": size.seeds,
            "points": size.points,
            "device": size.device,
        },
        **({"external": size.external.record} if size.external else {}),
        "tables": [_table(table, outcome) for table in tables],
        "failed": [
            {"cell": cell.label, "key": cell.key, "reason": outcome.failed[cell.key]}
            for cell in with_needs(cells_of(tables))
            if cell.key in outcome.failed
        ],
    }
    write_json(folder / RESULTS, record)
    drawing.report(folder, folder / PAGE)
    return record


def _table(table: ResultTable, outcome: RunOutcome) -> dict[str, Any]:
    return {
        "title": table.title,
        "about": table.about,
        "differs": table.differs,
        "rows": list(dict.fromkeys(entry.row for entry in table.entries)),
        "columns": list(dict.fromkeys(entry.column for entry in table.entries)),
        "entries": [_entry(entry, outcome) for entry in table.entries],
    }


def _entry(entry: TableEntry, outcome: RunOutcome) -> dict[str, Any]:
    values = [
        value if value is not None and math.isfinite(value) else None
        for value in values_of(entry, outcome.results)
    ]
    finite = (
        [] if None in values else [value for value in values if value is not None]
    )  # one that overflowed has no place in a mean
    estimate = Estimate.of(finite) if finite else None
    return {
        "row": entry.row,
        "column": entry.column,
        "quantity": entry.quantity,
        "cells": [cell.key for cell in entry.cells],
        "values": values,
        "mean": estimate.mean if estimate else None,
        "standard_error": estimate.error if estimate else None,
        "published": entry.published,
        "curves": [
            result["losses"]
            for cell in entry.cells
            if _is_line(result := outcome.results.get(cell.key, {}))
        ],
    }


def _is_line(result: Result) -> bool:
    return {"losses", "barrier_linear"} <= result.keys()


def printed_rows(table: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The rows of a table to print: mean ± standard error, and the published number."""
    at = {(entry["row"], entry["column"]): entry for entry in table["entries"]}
    for row in table["rows"]:
        yield {"": row, **{column: _text(at.get((row, column))) for column in table["columns"]}}


def _text(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    present, expected = len(entry["values"]), len(entry["cells"])
    mean = "not finite" if present else "missing"
    if entry["mean"] is not None:
        mean = _number(entry["mean"])
    error = "" if entry["standard_error"] is None else f" ± {_number(entry['standard_error'])}"
    incomplete = f", {present} of {expected}" if 0 < present < expected else ""
    published = "" if entry["published"] is None else f" (published {entry['published']:g})"
    return f"{mean}{error}{incomplete}{published}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
