"""results.json and amount.json: the tables of an experiment, and barriers by amount of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from symmerge.checkpoints.json_results import OMIT, Record, ResultFile


@dataclass(frozen=True, kw_only=True)
class SizeRecord(Record):
    """The size an experiment was run at."""

    name: Annotated[str, "`smoke`, `small` or `published`."]
    seeds: Annotated[int, "How many models of each kind."]
    points: Annotated[int, "Points on each line."]
    device: Annotated[str, "`cpu` or `cuda`."]


@dataclass(frozen=True, kw_only=True)
class ExternalData(Record):
    """A file that the user brought."""

    name: Annotated[str, "Name of the file."]
    content: Annotated[str, "Its sha256."]


@dataclass(frozen=True, kw_only=True)
class ExternalRecord(Record):
    """Models that the user brought with `--models`."""

    architecture: Annotated[str, "Class of the models."]
    models: Annotated[tuple[str, ...], "sha256 of each."]
    task: Annotated[str, "What they were measured by."]
    test: Annotated[ExternalData | None, "What they were measured on; null: trained further first."]
    train: Annotated[ExternalData | None, "What methods looked at."]


@dataclass(frozen=True, kw_only=True)
class EntryRecord(Record):
    """One number of a table."""

    row: Annotated[str, "Its row."]
    column: Annotated[str, "Its column."]
    quantity: Annotated[str, "What was measured, as `barrier_linear`."]
    cells: Annotated[tuple[str, ...], "Keys of the measurements it is the mean of."]
    values: Annotated[tuple[float, ...], "One value per cell that was computed."]
    mean: Annotated[float | None, "Their mean; null where one overflowed or there are none."]
    standard_error: Annotated[float | None, "Its standard error."]
    published: Annotated[float | None, "The paper's number."]
    curves: Annotated[tuple[tuple[float, ...], ...], "Losses on the line, where cells have one."]


@dataclass(frozen=True, kw_only=True)
class TableRecord(Record):
    """One table of a paper, measured again."""

    title: Annotated[str, "Its title."]
    about: Annotated[str, "What it shows."]
    differs: Annotated[str, "How our setting differs from the paper's."]
    rows: Annotated[tuple[str, ...], "Names of the rows."]
    columns: Annotated[tuple[str, ...], "Names of the columns."]
    entries: Annotated[tuple[EntryRecord, ...], "The numbers."]


@dataclass(frozen=True, kw_only=True)
class FailureRecord(Record):
    """A measurement that failed."""

    cell: Annotated[str, "What it was."]
    key: Annotated[str, "Its key."]
    reason: Annotated[str, "Why it failed."]


@dataclass(frozen=True, kw_only=True)
class ExperimentFile(ResultFile):
    """All tables of an experiment. No times and no paths: equal cells give equal bytes."""

    SCHEMA, WRITER = "symmerge.experiment/1", "symmerge experiment"

    name: Annotated[str, "Name of the experiment."]
    about: Annotated[str, "What it asks."]
    paper: Annotated[str, "Where the published numbers are."]
    size: Annotated[SizeRecord, "How large it was run."]
    external: Annotated[ExternalRecord | None, OMIT, "Models that the user brought."] = None
    tables: Annotated[tuple[TableRecord, ...], "Its tables."]
    failed: Annotated[tuple[FailureRecord, ...], "Measurements that failed."]


@dataclass(frozen=True, kw_only=True)
class AmountPoint(Record):
    """Barriers with one amount of data."""

    samples: Annotated[int, "How much data the method used; a single 0: it needs none."]
    barriers: Annotated[tuple[float, ...], "Barrier over the mean of each pair, in one order."]


@dataclass(frozen=True, kw_only=True)
class AmountMethod(Record):
    """One method with more and more data."""

    name: Annotated[str, "Name of the method."]
    label: Annotated[str, "Its name for people."]
    points: Annotated[tuple[AmountPoint, ...], "By rising amount."]


@dataclass(frozen=True, kw_only=True)
class AmountFile(ResultFile):
    """Barrier against amount of data; the page shows it beside a curve or a solution."""

    SCHEMA = "symmerge.amount/1"
    WRITER = "what measured it (see docs/results-format.md)"

    unit: Annotated[str, "What is counted: tokens, sentences, images."]
    methods: Annotated[tuple[AmountMethod, ...], "By method."]
