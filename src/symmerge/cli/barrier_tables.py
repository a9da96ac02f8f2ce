"""Tables of the verb barrier: ends in a line above, then a row per method."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import fmean

from symmerge.cli import console
from symmerge.evaluation.results import CurveFile, CurvesFile, Metrics, SimplexFile


def show_barriers(
    title: str, record: CurveFile | CurvesFile | SimplexFile, out: Path | None
) -> None:
    """Print what was measured: a table per pair, means of several, or one of all together."""
    wrote = f"; wrote {out}" if out else ""
    if isinstance(record, SimplexFile):
        title = f"{title}, {len(record.models)} models together{wrote}"
        console.show_table(f"Barriers: {title}", _simplex_rows(record))
        return
    pairs = f", {len(record.pairs)} pairs" if isinstance(record, CurvesFile) else ""
    _remark(f"Barriers: {title}{pairs}{wrote}")
    if isinstance(record, CurveFile):
        _show_pair("", record)
        return
    for number, pair in enumerate(record.pairs, 1):
        _show_pair(f"Pair {number}. ", pair)
    console.show_table(f"Means over {len(record.pairs)} pairs", _mean_rows(record))


def _remark(line: str) -> None:
    """A line above a table: a comment where the table is read by programs."""
    console.say(line if console.out.is_terminal else f"# {line}")


def _show_pair(which: str, pair: CurveFile) -> None:
    """Both models and their ensemble in a line, then what each method does in between."""
    a, b = pair.ends
    ends = {f"A {pair.models.a.where}": a, f"B {pair.models.b.where}": b}
    if pair.ensemble:
        ends["their ensemble"] = pair.ensemble
    metric = pair.main_metric
    named = "loss" if metric is None else f"loss ({metric})"
    parts = (f"{name} {_pair_of(metrics, metric)}" for name, metrics in ends.items())
    console.show_table(f"{which}{named}: {', '.join(parts)}", _line_rows(pair))


def _pair_of(metrics: Metrics, metric: str | None) -> str:
    other = f" ({metrics[metric]:.4g})" if metric and metric in metrics else ""
    return f"{metrics['loss']:.4g}{other}"


def _line_rows(pair: CurveFile) -> Iterator[dict[str, object]]:
    """What lies half way between both models, and both barriers, by method."""
    for method in pair.methods:
        half_way = next((point.metrics for point in method.points if point.t == 0.5), {})
        names = [name for name in ("loss", pair.main_metric) if name and name in half_way]
        yield {
            "method": method.label,
            **{f"{name} of the midpoint": f"{half_way[name]:.4g}" for name in names},
            "barrier over the mean": method.barrier_mean,
            "barrier over the line": method.barrier_linear,
        }


def _mean_rows(record: CurvesFile) -> Iterator[dict[str, object]]:
    """Means and standard errors of both barriers over several pairs."""
    for method in record.pairs[0].methods:
        means = record.summary[method.name]
        yield {
            "method": method.label,
            "barrier over the mean": means.barrier_mean.mean,
            "standard error over the mean": means.barrier_mean.error,
            "barrier over the line": means.barrier_linear.mean,
            "standard error over the line": means.barrier_linear.error,
        }


def _simplex_rows(record: SimplexFile) -> Iterator[dict[str, object]]:
    """Mean barrier of the pairs, and barrier of the mean of all models."""
    count = len(record.models)
    for method in record.methods:
        pairs = [method.barriers[a][b] for a, b in combinations(range(count), 2)]
        yield {
            "method": method.label,
            "mean barrier of a pair": fmean(pairs),
            f"barrier of all {count} merged": method.means[-1].barrier,
        }
