"""Tables of simplex.json: several models aligned at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, isfinite

from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.results import Metrics, SimplexFile, SimplexRecord
from symmerge.models.alignment_results import UniverseFile
from symmerge.report.names import model_names
from symmerge.report.phrases import metric_text
from symmerge.report.results import PLAIN
from symmerge.report.tables import (
    BarrierRow,
    CellValue,
    PageTable,
    models_table,
    setting_text,
    settings_table,
    task_facts,
    versions_text,
)


@dataclass(frozen=True)
class BarrierMatrix:
    """Barriers of all pairs of models, by one method."""

    label: str
    values: Sequence[Sequence[float]]

    @property
    def pairs(self) -> list[float]:
        """The barriers of all pairs, each pair once."""
        return [self.values[a][b] for a, b in combinations(range(len(self.values)), 2)]


def barrier_matrices(simplex: SimplexFile) -> list[BarrierMatrix]:
    """One matrix per method."""
    return [BarrierMatrix(method.label, method.barriers) for method in simplex.methods]


def names_of(simplex: SimplexFile) -> list[str]:
    """Names of the models for figures and tables."""
    return model_names([model.where for model in simplex.models])


def merged_barriers(simplex: SimplexFile) -> PageTable:
    """Barriers of every method, metrics of the full merge, of each model and of the ensemble."""
    metrics, count, first = simplex.task.metrics, len(simplex.models), simplex.methods[0]
    ranked = sorted(simplex.methods, key=_merged_loss)
    rows = [_merged_row(method, metrics) for method in ranked]
    alone = {f"{name} alone": end for name, end in zip(names_of(simplex), first.ends, strict=True)}
    alone[f"ensemble of all {count}"] = first.ensemble
    rows += [[name, *_cells(metrics, end), None, None, None] for name, end in alone.items()]
    columns = ["method", *map(metric_text, metrics), f"barrier of all {count} merged"]
    columns += ["mean barrier of a pair", "largest of a pair"]
    table = PageTable.of(f"Barriers, and every metric of all {count} models merged", columns, rows)
    roles = [_role(method, best=method is ranked[0]) for method in ranked]
    return replace(table, roles=(*roles, *["parent"] * count, "ensemble"), mark="best")


def _role(method: SimplexRecord, *, best: bool) -> str:
    return "plain" if method.name == PLAIN else "best" if best else "rest"


def _merged_loss(method: SimplexRecord) -> float:
    """The loss of all models merged; overflows come last."""
    loss = method.means[-1].metrics["loss"]
    return loss if isfinite(loss) else inf


def _merged_row(method: SimplexRecord, metrics: Sequence[str]) -> list[CellValue]:
    pairs, merged = BarrierMatrix(method.label, method.barriers).pairs, method.means[-1]
    mean = sum(pairs) / len(pairs)
    return [method.label, *_cells(metrics, merged.metrics), merged.barrier, mean, max(pairs)]


def _cells(metrics: Sequence[str], values: Metrics) -> list[CellValue]:
    return [values[metric] for metric in metrics]


def barrier_rows(simplex: SimplexFile) -> tuple[BarrierRow, ...]:
    """Both barriers of every method, averaged over pairs."""
    return tuple(
        BarrierRow(
            method.label,
            Estimate.of([line.barrier_mean for line in method.lines]),
            Estimate.of([line.barrier_linear for line in method.lines]),
        )
        for method in simplex.methods
    )


def pair_barriers(names: Sequence[str], matrices: Sequence[BarrierMatrix]) -> PageTable:
    """Barriers of all pairs of models, by method."""
    rows = [
        [names[a], names[b], *(matrix.values[a][b] for matrix in matrices)]
        for a, b in combinations(range(len(names)), 2)
    ]
    columns = ["from", "to", *(matrix.label for matrix in matrices)]
    return PageTable.of("Barrier over the mean, between every two models", columns, rows)


def barriers_by_count(simplex: SimplexFile) -> PageTable:
    """Barrier of the mean of the first k models, by method."""
    columns = ["models merged", *(method.label for method in simplex.methods)]
    means = zip(*(method.means for method in simplex.methods), strict=True)
    rows = [[row[0].count, *(mean.barrier for mean in row)] for row in means]
    return PageTable.of("Barrier of the mean of the first models", columns, rows)


def universes_table(simplex: SimplexFile) -> PageTable | None:
    """How each method aligned the models."""
    rows = [
        [method.label, *_rounds(method.universe)] for method in simplex.methods if method.universe
    ]
    columns = ["method", "spread, aligned to one", "spread at the end", "rounds"]
    columns += ["rounds that moved any", "moves in all", "cycle error"]
    return PageTable.of("The search for common coordinates", columns, rows) if rows else None


def _rounds(universe: UniverseFile) -> list[CellValue]:
    moved = universe.moved
    rounds = [len(moved), sum(map(bool, moved)), sum(moved)]
    return [universe.spreads[0], universe.spreads[-1], *rounds, universe.cycle_error]


def simplex_models(simplex: SimplexFile) -> PageTable:
    """Which checkpoints were merged."""
    return models_table("model", dict(zip(names_of(simplex), simplex.models, strict=True)))


def simplex_settings(simplex: SimplexFile) -> PageTable | None:
    """Settings of each method."""
    known = {
        method.label: dict(_flatten(method.universe.settings))
        for method in simplex.methods
        if method.universe
    }
    return settings_table(known)


def _flatten(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten nested settings to dotted names."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", setting_text(value)


def simplex_facts(simplex: SimplexFile) -> Iterator[tuple[str, str]]:
    """Facts about the measurement, as names and values."""
    first = simplex.methods[0]
    yield from task_facts(simplex.task, simplex.task.metrics)
    yield "models", str(len(simplex.models))
    yield "methods", ", ".join(method.label for method in simplex.methods)
    yield (
        "points",
        f"{len(first.lines[0].points)} on each of {len(first.lines)} lines,"
        f" {len(first.triangle.points)} on the triangle",
    )
    yield "versions", versions_text(simplex.versions)
