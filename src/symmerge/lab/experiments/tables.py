"""What an experiment shows: tables whose entries are means over cells, beside the published numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from symmerge.errors import MismatchError
from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.external import Accepts, ExternalModels


@dataclass(frozen=True)
class Size:
    """How large an experiment is: `smoke` shows that everything works, `small` runs on two cores in minutes, `published` as the paper says, on a GPU."""

    name: str
    seeds: int
    points: int
    device: str = "cpu"
    data: Path | None = None  # where data sets lie that do not come with the installation
    external: ExternalModels | None = (
        None  # models that are there already, in the place of those trained from seeds
    )


@dataclass(frozen=True)
class TableEntry:
    """One number of a table: the mean of a quantity over some cells, and what the paper has there."""

    row: str
    column: str
    cells: tuple[Cell, ...]
    quantity: str = "barrier_linear"  # a name in the cells' results, or several with / between them
    published: float | None = None


@dataclass(frozen=True)
class ResultTable:
    """`differs`: in what our setting is another than the paper's."""

    title: str
    entries: tuple[TableEntry, ...]
    about: str = ""
    differs: str = ""


@dataclass(frozen=True)
class Experiment:
    """`tables` declares the whole grid of a size; nothing is computed by asking for it.

    `takes`: which models may be given to it instead of trained ones; None where training is part of what it shows.
    """

    about: str
    paper: str
    tables: Callable[[Size], tuple[ResultTable, ...]]
    accepts: Accepts | None = None


SIZES: Mapping[str, Size] = {
    "smoke": Size("smoke", seeds=2, points=3),
    "small": Size("small", seeds=3, points=11),
    "published": Size("published", seeds=3, points=21, device="cuda"),
}


def with_columns(tables: tuple[ResultTable, ...], wanted: Sequence[str]) -> tuple[ResultTable, ...]:
    """Only columns whose name contains one of these words; all, if there are none."""
    known = list(dict.fromkeys(entry.column for table in tables for entry in table.entries))
    for word in wanted:
        if not any(word in column for column in known):
            raise MismatchError(
                f"--column {word}: no column has that in its name; there are {', '.join(known)}"
            )
    chosen = {column for column in known if not wanted or any(word in column for word in wanted)}
    kept = (
        replace(table, entries=tuple(entry for entry in table.entries if entry.column in chosen))
        for table in tables
    )
    return tuple(table for table in kept if table.entries)


def cells_of(tables: tuple[ResultTable, ...]) -> tuple[Cell, ...]:
    """All cells that tables show, each once."""
    return tuple(
        dict.fromkeys(cell for table in tables for entry in table.entries for cell in entry.cells)
    )


def values_of(entry: TableEntry, results: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """The quantity of every cell that was computed."""
    return [
        float(_at(results[cell.key], entry.quantity)) for cell in entry.cells if cell.key in results
    ]


def _at(result: Any, path: str) -> Any:
    return reduce(lambda found, name: found[name], path.split("/"), result)
