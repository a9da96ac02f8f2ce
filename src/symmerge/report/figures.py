"""Line charts: results -> SVG text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from symmerge.report.chart import (
    WIDE,
    Chart,
    ChartLine,
    Frame,
    Role,
    frame_for,
    labelled_chart,
    marked,
    set_ticks,
)
from symmerge.report.drawing import INK, MUTED, SERIES, draw, name_point
from symmerge.report.phrases import estimate_text, metric_text, number_text, position_text
from symmerge.report.results import PLAIN, CurveSummary

WIDTH, HEIGHT = 5.4, 3.25  # inches of a figure without its legend
LINE_HEIGHT = 0.22  # inches of a line of the legend
COLUMN = 27  # letters that fit in one of the two columns of the legend
# Seven markers and six colours: no two of 42 lines look alike.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class LineStyle:
    """How one line looks."""

    colour: str
    marker: str


STYLES = [LineStyle(*look) for look in zip(SERIES * len(MARKERS), cycle(MARKERS))]


def metric_curve(curve: CurveSummary, metric: str, name: str = "curve", frame: Frame = WIDE) -> str:
    """One metric along the line: every method, the ensemble, both models; the best is marked."""
    midpoint, (a, b) = curve.midpoint, curve.names
    frame = frame_for(frame, chart_lines(curve, metric))
    description = [
        f"{method.label}: {number_text(method.points[0][metric].mean)} at {a},"
        f" {number_text(method.points[midpoint][metric].mean)} at"
        f" t = {position_text(curve.t[midpoint])},"
        f" {number_text(method.points[-1][metric].mean)} at {b}."
        for method in curve.ranked
    ]
    if curve.ensemble:
        description.append(f"Ensemble of both: {number_text(curve.ensemble[metric].mean)}.")
    return draw(
        name,
        f"{metric} along the path from {a} to {b}",
        " ".join(description),
        (frame.width, frame.height),
        lambda figure: _paint_curve(figure, frame, curve, metric),
        font=frame.font,
    )


def chart_lines(curve: CurveSummary, metric: str) -> list[ChartLine]:
    """A line per method, and one for the ensemble."""
    best = curve.best
    roles: dict[str, Role] = {PLAIN: "plain", **({best.name: "best"} if best else {})}
    lines = [
        ChartLine(
            method.name,
            method.label,
            curve.t,
            [point[metric] for point in method.points],
            roles.get(method.name, "rest"),
            curve.midpoint,
        )
        for method in curve.methods
    ]
    if curve.ensemble and isfinite(curve.ensemble[metric].mean):
        level = [curve.ensemble[metric]] * len(curve.t)
        lines.append(ChartLine("ensemble", "ensemble", curve.t, level, "ensemble", curve.midpoint))
    return lines


def _paint_curve(
    figure: Figure, frame: Frame, curve: CurveSummary, metric: str
) -> Mapping[str, float]:
    chart = Chart.on(figure, frame, "", metric_text(metric))
    axes, (first, last) = chart.axes, (curve.t[0], curve.t[-1])
    pad = 0.09 if frame.narrow else 0.04
    axes.set_xlim(first - pad, last + pad)
    _paint_parents(axes, curve, metric)
    chart.paint(chart_lines(curve, metric))
    # A phone has room for the letters; the caption has the names.
    names = ["", ""] if frame.narrow else [f": {name}" for name in curve.names]
    middle = "midpoint" if not frame.narrow and curve.t[curve.midpoint] == 0.5 else ""
    place = curve.t[curve.midpoint]
    texts = f"t = {first:g}\nA{names[0]}", f"{place:g}\n{middle}", f"{last:g}\nB{names[1]}"
    set_ticks(axes, (first, place, last), texts)
    axes.axvline(first, color=MUTED, linewidth=0.9, zorder=1.5).set_gid("cursor")
    (left, _), (right, _) = (axes.transData.transform((t, axes.get_ylim()[0])) for t in (0.0, 1.0))
    return {"start": float(left), "length": float(right - left)}


def _paint_parents(axes: Axes, curve: CurveSummary, metric: str) -> None:
    """Both models, and the straight line between them."""
    ends = [end[metric].mean for end in curve.parents]
    between = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (1, 2))}
    axes.plot([curve.t[0], curve.t[-1]], ends, **between)
    ring = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": INK, "clip_on": False}
    named = zip((curve.t[0], curve.t[-1]), ends, "AB", (-13.0, 13.0), strict=True)
    for t, value, letter, offset in named:
        if isfinite(value):
            axes.plot(t, value, marker="o", **ring, zorder=3)
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


def amount_curve(amount: AmountFile, name: str = "amount", frame: Frame = WIDE) -> str:
    """The barrier against the amount of data; data-free methods are horizontal lines."""
    counts = {point.samples for method in amount.methods for point in method.points}
    ticks = sorted(map(float, counts - {0}))
    lines = marked(_amount_lines(amount, ticks))
    description = [
        f"{line.label}: {estimate_text(line.values[0])} with the least data,"
        f" {estimate_text(line.values[-1])} with the most."
        for line in lines
    ]

    def prepare(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{count:,.0f}" for count in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())

    labels = f"{amount.unit} (log scale)", "barrier"
    title = f"Barrier against {amount.unit}"
    return labelled_chart(name, title, description, frame, labels, lines, prepare)


def _amount_lines(amount: AmountFile, ticks: Sequence[float]) -> Iterator[ChartLine]:
    for method in amount.methods:
        x = [float(point.samples) for point in method.points]
        values = [Estimate.of(point.barriers) for point in method.points]
        x, values = (ticks, values * len(ticks)) if x == [0] else (x, values)
        yield ChartLine(method.name, method.label, x, values)


def barriers_by_count(simplex: SimplexFile, name: str = "together", frame: Frame = WIDE) -> str:
    """The barrier of the mean of the first k models against k, a line for each method."""
    counts = [float(mean.count) for mean in simplex.methods[0].means]
    lines = marked(
        ChartLine(method.name, method.label, counts, [Estimate(m.barrier) for m in method.means])
        for method in simplex.methods
    )
    description = [
        f"{line.label}: {number_text(line.values[0].mean)} with {counts[0]:.0f} models,"
        f" {number_text(line.values[-1].mean)} with {counts[-1]:.0f}."
        for line in lines
    ]
    title = "Barrier against the number of models merged"
    labels = "models merged", "barrier"

    def prepare(axes: Axes) -> None:
        axes.set_xticks(counts, [f"{count:.0f}" for count in counts])

    return labelled_chart(name, title, description, frame, labels, lines, prepare)


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
