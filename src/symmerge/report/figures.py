"""Line charts: results -> SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import isfinite
from statistics import fmean
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.experiment_results import AmountFile
from symmerge.evaluation.results import SimplexFile
from symmerge.observation.correlations import Correlations, LayerCorrelation
from symmerge.report.drawing import INK, MUTED, SERIES, draw, name_point
from symmerge.report.phrases import estimate_text, number_text, position_text
from symmerge.report.results import CurveSummary

WIDTH, HEIGHT = 5.4, 3.25  # inches of a figure without its legend
LINE_HEIGHT = 0.22  # inches of a line of the legend
COLUMN = 27  # letters that fit in one of the two columns of the legend
# Seven markers and nine colours: no two of 63 lines look alike.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LOG_FROM = 20.0  # ratio of the values beyond which a linear axis would flatten all lines but one


@dataclass(frozen=True)
class LineStyle:
    """How one line looks."""

    colour: str
    marker: str


STYLES = [LineStyle(*look) for look in zip(SERIES * len(MARKERS), cycle(MARKERS))]


def metric_curve(curve: CurveSummary, metric: str, name: str = "curve") -> str:
    """One metric along the line: every method with its error band, the ensemble, both models."""
    lines = {
        method.label: [point[metric].mean for point in method.points] for method in curve.methods
    }
    midpoint = curve.midpoint
    description = [
        f"{label}: {number_text(line[0])} at model A, {number_text(line[midpoint])} at"
        f" t = {position_text(curve.t[midpoint])}, {number_text(line[-1])} at model B."
        for label, line in lines.items()
    ]
    if curve.ensemble:
        description.append(f"Ensemble of both: {number_text(curve.ensemble[metric].mean)}.")
    return draw(
        name,
        f"{metric} along the path from model A to model B",
        " ".join(description),
        figure_size([*lines, "line between A and B", "ensemble of both"]),
        lambda figure: _paint_curve(figure, curve, metric),
    )


def _paint_curve(figure: Figure, curve: CurveSummary, metric: str) -> Mapping[str, float]:
    axes = figure.add_subplot(xlabel="t: share of model B", ylabel=metric)
    for method, style in zip(curve.methods, cycle(STYLES)):
        line = [point[metric] for point in method.points]
        paint_line(axes, curve.t, line, method.name, method.label, style)
    _paint_references(axes, curve, metric)
    axes.set_xlim(curve.t[0] - 0.08, curve.t[-1] + 0.08)
    scale_axis(axes, [point[metric].mean for method in curve.methods for point in method.points])
    axes.axvline(curve.t[0], color=INK, linewidth=0.9).set_gid("cursor")
    legend(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # freeze the layout: the page's cursor must hit the points
    (left, _), (right, _) = (axes.transData.transform((t, axes.get_ylim()[0])) for t in (0.0, 1.0))
    return {"start": float(left), "length": float(right - left)}


def _paint_references(axes: Axes, curve: CurveSummary, metric: str) -> None:
    """Both models, the straight line between them, and their ensemble."""
    ends = [curve.methods[0].points[at][metric].mean for at in (0, -1)]
    between = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (1, 2))}
    axes.plot(curve.t[:: len(curve.t) - 1], ends, **between, label="line between A and B")
    if curve.ensemble and isfinite(curve.ensemble[metric].mean):
        level = {"color": INK, "linewidth": 1.1, "linestyle": (0, (6, 3))}
        axes.axhline(curve.ensemble[metric].mean, **level, label="ensemble of both")
    ring = {"markersize": 8, "markerfacecolor": "none", "markeredgecolor": INK, "clip_on": False}
    named = zip((curve.t[0], curve.t[-1]), ends, "AB", (-12.0, 12.0), strict=True)
    for t, value, letter, offset in named:
        if isfinite(value):
            axes.plot(t, value, marker="o", **ring)
            name_point(axes, (t, value), letter, (offset, 0.0))


def paint_line(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[Estimate],
    name: str,
    label: str,
    style: LineStyle,
) -> None:
    """Draw a line with its error band; `name` gives their SVG ids."""
    means = [value.mean for value in values]
    look = {"color": style.colour, "marker": style.marker, "markersize": 3.5}
    axes.plot(x, means, **look, label=_wrapped(label))
    if values[0].error is not None:
        low, high = (
            [value.mean + side * (value.error or 0.0) for value in values] for side in (-1, 1)
        )
        band = axes.fill_between(x, low, high, color=style.colour, alpha=0.22, linewidth=0)
        band.set_gid(f"band-{name}")


def legend(figure: Figure) -> None:
    """Draw the legend below the axes, in two columns; nothing where no line has a label."""
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside lower center", ncols=2)


def _wrapped(label: str) -> str:
    """Wrap a label to the width of a legend column."""
    return fill(label, COLUMN)


def figure_size(labels: Sequence[str]) -> tuple[float, float]:
    """Figure size with room for the legend below the axes."""
    lines = [_wrapped(label).count("\n") + 1 for label in labels]
    half = (len(lines) + 1) // 2
    return WIDTH, HEIGHT + LINE_HEIGHT * max(sum(lines[:half]), sum(lines[half:]))


def scale_axis(axes: Axes, values: Sequence[float]) -> None:
    """Set a log scale if the values span too much for a linear one."""
    finite = [value for value in values if isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > LOG_FROM * min(finite):
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")
        axes.yaxis.set_major_formatter("{x:g}")  # the default uses mathtext, which is off
        axes.yaxis.set_minor_formatter(NullFormatter())


def layer_correlation(correlations: Correlations, name: str = "layers") -> str:
    """Correlation of matched features per layer, before and after alignment."""
    ordered = sorted(correlations.layers, key=lambda row: (row.space, row.layer))
    rows: dict[str, list[LayerCorrelation]] = {}
    for row in ordered:
        rows.setdefault(row.space, []).append(row)
    description = [
        f"{space}: mean {number_text(fmean(row.before for row in of_space))} before,"
        f" {number_text(fmean(row.after for row in of_space))} after alignment."
        for space, of_space in rows.items()
    ]
    return draw(
        name,
        "Feature correlation per layer, before and after alignment",
        " ".join(description),
        figure_size([f"{space}, before" for space in rows for _ in range(2)]),
        lambda figure: _paint_layers(figure, rows),
    )


def _paint_layers(figure: Figure, rows: Mapping[str, Sequence[LayerCorrelation]]) -> None:
    axes = figure.add_subplot(xlabel="layer", ylabel="mean correlation")
    for (space, of_space), colour, marker in zip(rows.items(), cycle(SERIES[1:]), cycle(MARKERS)):
        layers = [row.layer for row in of_space]
        look = {"color": colour, "marker": marker, "markersize": 5}
        before, after = [row.before for row in of_space], [row.after for row in of_space]
        dashed = {"linestyle": (0, (4, 2)), "markerfacecolor": "none"}
        axes.plot(layers, before, **look, **dashed, label=_wrapped(f"{space}, before"))
        axes.plot(layers, after, **look, label=_wrapped(f"{space}, after"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure)


def amount_curve(amount: AmountFile, name: str = "amount") -> str:
    """The barrier against the amount of data; data-free methods are horizontal lines."""
    lines = {
        method.label: [Estimate.of(point.barriers) for point in method.points]
        for method in amount.methods
    }
    description = [
        f"{label}: {estimate_text(line[0])} with the least data,"
        f" {estimate_text(line[-1])} with the most."
        for label, line in lines.items()
    ]
    return draw(
        name,
        f"Barrier against {amount.unit}",
        " ".join(description),
        figure_size([*lines]),
        lambda figure: _paint_amount(figure, amount),
    )


def _paint_amount(figure: Figure, amount: AmountFile) -> None:
    counts = {point.samples for method in amount.methods for point in method.points}
    ticks = sorted(map(float, counts - {0}))
    axes = figure.add_subplot(xlabel=f"{amount.unit} (log scale)", ylabel="barrier")
    axes.set_xscale("log")
    for method, style in zip(amount.methods, cycle(STYLES)):
        x = [float(point.samples) for point in method.points]
        line = [Estimate.of(point.barriers) for point in method.points]
        x, line = (ticks, line * len(ticks)) if x == [0] else (x, line)
        paint_line(axes, x, line, method.name, method.label, style)
    axes.set_xticks(ticks, [f"{count:,.0f}" for count in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    legend(figure)


def barriers_by_count(simplex: SimplexFile, name: str = "together") -> str:
    """The barrier of the mean of the first k models against k, a line for each method."""
    counts = [float(mean.count) for mean in simplex.methods[0].means]
    lines = {method.label: [mean.barrier for mean in method.means] for method in simplex.methods}
    description = [
        f"{label}: {number_text(line[0])} with {counts[0]:.0f} models,"
        f" {number_text(line[-1])} with {counts[-1]:.0f}."
        for label, line in lines.items()
    ]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="models merged", ylabel="barrier")
        for (label, line), style in zip(lines.items(), cycle(STYLES)):
            values = [Estimate(value) for value in line]
            paint_line(axes, counts, values, label, label, style)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        scale_axis(axes, [value for line in lines.values() for value in line])
        legend(figure)

    title = "Barrier against the number of models merged"
    return draw(name, title, " ".join(description), figure_size([*lines]), paint)


def objective_curve(
    label: str,
    runs: Sequence[Sequence[float]],
    name: str = "objective",
    *,
    step: str = "sweep",
    quantity: str = "objective",
) -> str:
    """The solver's objective, step by step; one line for each pair."""
    first = runs[0]
    of_pairs = f"; the first of {len(runs)} pairs." if len(runs) > 1 else "."
    start, end = number_text(first[0]), number_text(first[-1])
    description = f"{len(first)} {step}s, from {start} to {end}{of_pairs}"
    look = {"color": SERIES[1], "marker": "o", "markersize": 3.5}

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel=step, ylabel=quantity)
        for run in runs:
            axes.plot(range(1, len(run) + 1), run, **look, alpha=max(0.3, 1 / len(runs)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    title = f"{quantity.capitalize()} per {step}: {label}"
    return draw(name, title, description, (WIDTH, 2.8), paint)
