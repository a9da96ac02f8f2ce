"""Results of an experiment: one JSON file, a page, and tables to print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite, nan
from pathlib import Path

from symmerge import report as drawing  # the package: imports matplotlib on first use
from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.experiment_results import (
    EntryRecord,
    ExperimentFile,
    ExternalRecord,
    FailureRecord,
    SizeRecord,
    TableRecord,
)
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

RESULTS, PAGE = "results.json", "page.html"


def write_results(
    folder: Path,
    name: str,
    experiment: Experiment,
    size: Size,
    tables: tuple[ResultTable, ...],
    outcome: RunOutcome,
) -> ExperimentFile:
    """Write results.json and its page."""
    record = make_record(name, experiment, size, tables, outcome)
    record.write(folder / RESULTS)
    drawing.report(folder, folder / PAGE)
    return record


def make_record(
    name: str,
    experiment: Experiment,
    size: Size,
    tables: tuple[ResultTable, ...],
    outcome: RunOutcome,
) -> ExperimentFile:
    """Content of results.json. No times, no paths: equal cells give equal bytes."""
    return ExperimentFile(
        name=name,
        about=experiment.about,
        paper=experiment.paper,
        size=SizeRecord(name=size.name, seeds=size.seeds, points=size.points, device=size.device),
        external=ExternalRecord.from_json(size.external.record) if size.external else None,
        tables=tuple(_table(table, outcome) for table in tables),
        failed=tuple(
            FailureRecord(cell=cell.label, key=cell.key, reason=outcome.failed[cell.key])
            for cell in with_needs(cells_of(tables))
            if cell.key in outcome.failed
        ),
    )


def _table(table: ResultTable, outcome: RunOutcome) -> TableRecord:
    return TableRecord(
        title=table.title,
        about=table.about,
        differs=table.differs,
        rows=tuple(dict.fromkeys(entry.row for entry in table.entries)),
        columns=tuple(dict.fromkeys(entry.column for entry in table.entries)),
        entries=tuple(_entry(entry, outcome) for entry in table.entries),
    )


def _entry(entry: TableEntry, outcome: RunOutcome) -> EntryRecord:
    values = _floats(values_of(entry, outcome.results))
    # No mean if a value overflowed.
    estimate = Estimate.of(values) if values and all(map(isfinite, values)) else None
    # The line that was measured in another form is in a part of the result.
    part = entry.quantity.rpartition("/")[0]
    results = [outcome.results.get(cell.key, {}) for cell in entry.cells]
    results = [result.get(part, result) for result in results]
    return EntryRecord(
        row=entry.row,
        column=entry.column,
        quantity=entry.quantity,
        cells=tuple(cell.key for cell in entry.cells),
        values=tuple(values),
        mean=estimate.mean if estimate else None,
        standard_error=estimate.error if estimate else None,
        published=entry.published,
        curves=tuple(tuple(_floats(result["losses"])) for result in results if _is_line(result)),
    )


def _floats(values: Iterable[float | None]) -> list[float]:
    return [nan if value is None else float(value) for value in values]


def _is_line(result: Result) -> bool:
    return {"losses", "barrier_linear"} <= result.keys()


def printed_rows(table: TableRecord) -> Iterator[dict[str, str]]:
    """The rows of a table to print: mean ± standard error, and the published number."""
    at = {(entry.row, entry.column): entry for entry in table.entries}
    for row in table.rows:
        yield {"": row, **{column: _text(at.get((row, column))) for column in table.columns}}


def _text(entry: EntryRecord | None) -> str:
    if entry is None:
        return ""
    present, expected = len(entry.values), len(entry.cells)
    mean = "not finite" if present else "missing"
    if entry.mean is not None:
        mean = _number(entry.mean)
    error = "" if entry.standard_error is None else f" ± {_number(entry.standard_error)}"
    incomplete = f", {present} of {expected}" if 0 < present < expected else ""
    published = "" if entry.published is None else f" (published {entry.published:g})"
    return f"{mean}{error}{incomplete}{published}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
