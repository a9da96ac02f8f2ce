"""Declarations of experiments: sizes, and tables of means over cells with published numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from symmerge.errors import MismatchError
from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.external import Accepts, ExternalModels, NamedModels


@dataclass(frozen=True)
class Size:
    """How large an experiment is.

    `smoke` checks that everything runs, `small` takes minutes on two cores, `published` is the
    paper's size, for a GPU. `external` models replace those trained from seeds.
    """

    name: str
    seeds: int
    points: int
    device: str = "cpu"
    data: Path | None = None  # folder of data sets that do not come with the installation
    external: ExternalModels | None = None


@dataclass(frozen=True)
class TableEntry:
    """One number of a table: the mean of a quantity over cells, and the published number.

    `quantity` is a key of the cells' results, or several with / between them.
    """

    row: str
    column: str
    cells: tuple[Cell, ...]
    quantity: str = "barrier_linear"
    published: float | None = None


@dataclass(frozen=True)
class ResultTable:
    """One table of a paper; `differs` says how our setting differs from the paper's."""

    title: str
    entries: tuple[TableEntry, ...]
    about: str = ""
    differs: str = ""


@dataclass(frozen=True)
class Experiment:
    """An experiment; `tables` declares its grid for a size and computes nothing.

    `accepts`: which external models may replace trained ones; None if it is about training.
    `named`: size of models -> models of the hub, which `--size` may choose as well.
    """

    about: str
    paper: str
    tables: Callable[[Size], tuple[ResultTable, ...]]
    accepts: Accepts | None = None
    named: Mapping[str, NamedModels] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, str]:
        """What `--size` may be -> the size of the experiment."""
        return {name: name for name in SIZES} | dict.fromkeys(self.named, "published")


SIZES: Mapping[str, Size] = {
    "smoke": Size("smoke", seeds=2, points=3),
    "small": Size("small", seeds=3, points=11),
    "published": Size("published", seeds=3, points=21, device="cuda"),
}


def with_columns(
    tables: tuple[ResultTable, ...], patterns: Sequence[str]
) -> tuple[ResultTable, ...]:
    """Keep columns whose name contains one of the patterns; all, if there are no patterns."""
    columns = list(dict.fromkeys(entry.column for table in tables for entry in table.entries))
    for pattern in patterns:
        if not any(pattern in column for column in columns):
            raise MismatchError(
                f"--column {pattern}: no column has that in its name;"
                f" choose from {', '.join(columns)}"
            )
    chosen = {
        column
        for column in columns
        if not patterns or any(pattern in column for pattern in patterns)
    }
    narrowed = (
        replace(table, entries=tuple(entry for entry in table.entries if entry.column in chosen))
        for table in tables
    )
    return tuple(table for table in narrowed if table.entries)


def cells_of(tables: tuple[ResultTable, ...]) -> tuple[Cell, ...]:
    """All cells that tables show, each once."""
    entries = (entry for table in tables for entry in table.entries)
    return tuple(dict.fromkeys(cell for entry in entries for cell in entry.cells))


def values_of(entry: TableEntry, results: Mapping[str, Mapping[str, object]]) -> list[float]:
    """The quantity of every cell that has a result."""
    return [
        float(_lookup(results[cell.key], entry.quantity))
        for cell in entry.cells
        if cell.key in results
    ]


def _lookup(result: Any, path: str) -> Any:
    return reduce(lambda value, name: value[name], path.split("/"), result)
