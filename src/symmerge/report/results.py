"""Result files as they are read: one shape for one pair and for several, with errors over the pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from symmerge.errors import SymmergeError
from symmerge.evaluation.estimates import Estimate

CURVE, CURVES = "symmerge.curve/1", "symmerge.curves/1"
SIMPLEX, STRUCTURE, CORRELATIONS, AMOUNT = (
    "symmerge.simplex/1",
    "symmerge.structure/1",
    "symmerge.correlations/1",
    "symmerge.amount/1",
)
EXPERIMENT = "symmerge.experiment/1"
# file -> what it may hold, what writes it
SCHEMAS = {
    "curve.json": (CURVE, CURVES),
    "simplex.json": (SIMPLEX,),
    "solution.json": ("symmerge.solution/1",),
    "universe.json": ("symmerge.universe/1",),
    "structure.json": (STRUCTURE,),
    "correlations.json": (CORRELATIONS,),
    "amount.json": (AMOUNT,),
    "results.json": (EXPERIMENT,),
}
WRITERS = {
    "curve.json": "symmerge barrier",
    "simplex.json": "symmerge barrier --together",
    "solution.json": "symmerge align",
    "universe.json": "symmerge align A B C",
    "structure.json": "symmerge align",
    "correlations.json": "symmerge align with data",
    "amount.json": "what measured it (see docs/results-format.md)",
    "results.json": "symmerge experiment",
}
OTHERS = (
    "simplex.json",
    "solution.json",
    "universe.json",
    "structure.json",
    "correlations.json",
    "amount.json",
    "results.json",
)  # as they are
ENOUGH = (
    "curve.json",
    "simplex.json",
    "solution.json",
    "universe.json",
    "results.json",
)  # a page needs one of them


@dataclass(frozen=True)
class MethodSummary:
    """What one way of merging gave: every metric at every t, both barriers, and the objective of each pair's sweeps."""

    name: str
    label: str
    points: tuple[Mapping[str, Estimate], ...]
    barrier_mean: Estimate
    barrier_linear: Estimate
    barriers: tuple[float, ...]  # over the mean, of each pair
    settings: Mapping[str, Any]
    objectives: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CurveSummary:
    """The path between two models, or the mean path of several pairs."""

    task: Mapping[str, Any]
    metrics: tuple[str, ...]
    pairs: tuple[Mapping[str, Mapping[str, Any]], ...]
    t: tuple[float, ...]
    methods: tuple[MethodSummary, ...]
    ensemble: Mapping[str, Estimate] | None
    versions: Mapping[str, str]

    @property
    def middle(self) -> int:
        """The point closest to an even average."""
        return min(range(len(self.t)), key=lambda at: abs(self.t[at] - 0.5))


@dataclass(frozen=True)
class Results:
    """A folder's results; what was not measured is None. There is a curve, a simplex, a solution, a universe or an experiment."""

    folder: Path
    curve: CurveSummary | None
    simplex: Mapping[str, Any] | None
    solution: Mapping[str, Any] | None
    universe: Mapping[str, Any] | None
    structure: Mapping[str, Any] | None
    correlations: Mapping[str, Any] | None
    amount: Mapping[str, Any] | None
    experiment: Mapping[str, Any] | None


def read_results(folder: Path) -> list[Results]:
    """The results of a folder that has one of the files that are enough, or of each of its subfolders that has one."""
    if not folder.is_dir():
        raise SymmergeError(
            f"{folder} is no folder: give the one that symmerge barrier or align wrote"
        )
    folders = (
        [folder]
        if any((folder / name).exists() for name in ENOUGH)
        else sorted({file.parent for name in ENOUGH for file in folder.glob(f"*/{name}")})
    )
    if not folders:
        raise SymmergeError(
            f"{folder} and its subfolders have no {', no '.join(ENOUGH)}: run symmerge barrier A B --out {folder} first"
        )
    return [_read_folder(found) for found in folders]


def _read_folder(folder: Path) -> Results:
    found = {name: read_json(folder / name) for name in WRITERS if (folder / name).exists()}
    with whole(folder / "curve.json"):
        curve = as_curve(found["curve.json"]) if "curve.json" in found else None
    with whole(folder / "simplex.json"):
        if "simplex.json" in found and (
            not found["simplex.json"]["methods"] or len(found["simplex.json"]["models"]) < 3
        ):
            raise ValueError("it holds no methods, or less than three models")
    return Results(folder, curve, *(found.get(name) for name in OTHERS))


def read_json(file: Path) -> Mapping[str, Any]:
    """A result file of a known schema."""
    writer, schemas = WRITERS[file.name], SCHEMAS[file.name]
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SymmergeError(
            f"{file} cannot be read as JSON ({error}): write it again with {writer}"
        ) from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found not in schemas:
        known = " or ".join(str(schema) for schema in schemas)
        raise SymmergeError(
            f"{file} has schema {found!r}, this version reads {known}: write it again with {writer}, or update symmerge"
        )
    return content


@contextmanager
def whole(file: Path) -> Iterator[None]:
    """Where a file's content is used: one that is not whole is named."""
    try:
        yield
    except KeyError as error:
        raise SymmergeError(
            f"{file} has no {error}: write it again with {WRITERS[file.name]}"
        ) from error
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise SymmergeError(
            f"{file} is not of the form it claims ({error}): write it again with {WRITERS[file.name]}"
        ) from error


def as_curve(record: Mapping[str, Any]) -> CurveSummary:
    """A `curve` record, or the mean over the pairs of a `curves` record."""
    pairs = record["pairs"] if record["schema"] == CURVES else [record]
    if not pairs or not pairs[0]["methods"]:
        raise ValueError("it holds no curve")
    first = pairs[0]
    metrics = ("loss", *(metric for metric in first["task"]["metrics"] if metric != "loss"))
    names = [method["name"] for method in first["methods"]]
    grid = tuple(float(point["t"]) for point in first["methods"][0]["points"])
    if len(grid) < 2:
        raise ValueError("a curve needs two points or more")
    for pair in pairs:
        if [method["name"] for method in pair["methods"]] != names:
            raise ValueError("the pairs were merged by different methods")
        if any(
            tuple(float(point["t"]) for point in method["points"]) != grid
            for method in pair["methods"]
        ):
            raise ValueError("the curves have different values of t")
    methods = tuple(
        _method([pair["methods"][at] for pair in pairs], metrics) for at in range(len(names))
    )
    ensembles = [pair["ensemble"] for pair in pairs if pair.get("ensemble")]
    return CurveSummary(
        task=first["task"],
        metrics=metrics,
        pairs=tuple(pair["models"] for pair in pairs),
        t=grid,
        methods=methods,
        ensemble=_estimates(ensembles, metrics) if len(ensembles) == len(pairs) else None,
        versions=first["versions"],
    )


def _method(runs: Sequence[Mapping[str, Any]], metrics: tuple[str, ...]) -> MethodSummary:
    first, barriers = runs[0], tuple(number(run["barrier_mean"]) for run in runs)
    return MethodSummary(
        name=str(first["name"]),
        label=str(first["label"]),
        points=tuple(
            _estimates(points, metrics)
            for points in zip(*(run["points"] for run in runs), strict=True)
        ),
        barrier_mean=Estimate.of(barriers),
        barrier_linear=Estimate.of([number(run["barrier_linear"]) for run in runs]),
        barriers=barriers,
        settings=first.get("settings") or {},
        objectives=tuple(
            tuple(map(number, run["objective"])) for run in runs if run.get("objective")
        ),
    )


def _estimates(
    records: Sequence[Mapping[str, Any]], metrics: tuple[str, ...]
) -> dict[str, Estimate]:
    return {
        metric: Estimate.of([number(record[metric]) for record in records]) for metric in metrics
    }


def number(value: float | int | None) -> float:
    """JSON has no infinity: a measure that overflowed is null there, and a gap in a figure."""
    return nan if value is None else float(value)
