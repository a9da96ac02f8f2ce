"""Figures with lines: results -> SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import isfinite
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from symmerge.evaluation.estimates import Estimate
from symmerge.report.drawing import INK, MUTED, SERIES, draw
from symmerge.report.phrases import estimate, position, short
from symmerge.report.results import CurveSummary, number

WIDTH, HEIGHT, LINE_HEIGHT = (
    5.4,
    3.25,
    0.22,
)  # inches: of a figure, of one without a legend, and of a line of the legend
COLUMN = 27  # letters that fit in half the width, where the legend has two columns
MARKERS = (
    "o",
    "s",
    "^",
    "D",
    "v",
    "P",
    "X",
)  # seven markers, eight colours: no two of 56 lines look alike
LOG_FROM = 20.0  # times the smallest value: where a linear axis would show one line only


def metric_curve(curve: CurveSummary, metric: str, name: str = "curve") -> str:
    """One metric along the path: every method with its error band, the ensemble, and both parents."""
    lines = {
        method.label: [point[metric].mean for point in method.points] for method in curve.methods
    }
    middle = curve.middle
    said = [
        f"{label}: {short(line[0])} at model A, {short(line[middle])} at t = {position(curve.t[middle])}, {short(line[-1])} at model B."
        for label, line in lines.items()
    ]
    if curve.ensemble:
        said.append(f"Ensemble of both: {short(curve.ensemble[metric].mean)}.")
    size = size_of([*lines, "line between A and B", "ensemble of both"])
    return draw(
        name,
        f"{metric} along the path from model A to model B",
        " ".join(said),
        size,
        lambda figure: _paint_curve(figure, curve, metric),
    )


def _paint_curve(figure: Figure, curve: CurveSummary, metric: str) -> Mapping[str, float]:
    axes = figure.add_subplot(xlabel="t: share of model B", ylabel=metric)
    for method, colour, marker in zip(curve.methods, cycle(SERIES), cycle(MARKERS)):
        paint_line(
            axes,
            curve.t,
            [point[metric] for point in method.points],
            method.name,
            method.label,
            colour,
            marker,
        )
    ends = [curve.methods[0].points[at][metric].mean for at in (0, -1)]
    axes.plot(
        curve.t[:: len(curve.t) - 1],
        ends,
        color=MUTED,
        linewidth=0.9,
        linestyle=(0, (1, 2)),
        label="line between A and B",
    )
    if curve.ensemble and isfinite(curve.ensemble[metric].mean):
        axes.axhline(
            curve.ensemble[metric].mean,
            color=INK,
            linewidth=1.1,
            linestyle=(0, (6, 3)),
            label="ensemble of both",
        )
    for t, value, letter, offset in zip(
        (curve.t[0], curve.t[-1]), ends, "AB", (-12, 12), strict=True
    ):
        if isfinite(value):
            axes.plot(
                t,
                value,
                marker="o",
                markersize=8,
                markerfacecolor="none",
                markeredgecolor=INK,
                clip_on=False,
            )
            axes.annotate(
                letter,
                (t, value),
                (offset, 0),
                textcoords="offset points",
                ha="center",
                va="center",
                fontweight="bold",
            )
    axes.set_xlim(curve.t[0] - 0.08, curve.t[-1] + 0.08)
    scale(axes, [point[metric].mean for method in curve.methods for point in method.points])
    axes.axvline(curve.t[0], color=INK, linewidth=0.9).set_gid("cursor")
    legend(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine(
        "none"
    )  # what was laid out stays there, so that the cursor of the page meets the points
    (left, _), (right, _) = (axes.transData.transform((t, axes.get_ylim()[0])) for t in (0.0, 1.0))
    return {"start": float(left), "length": float(right - left)}


def paint_line(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[Estimate],
    name: str,
    label: str,
    colour: str,
    marker: str,
) -> None:
    axes.plot(
        x,
        [value.mean for value in values],
        color=colour,
        marker=marker,
        markersize=3.5,
        label=_wrapped(label),
    )
    if values[0].error is not None:
        low, high = (
            [value.mean + side * (value.error or 0.0) for value in values] for side in (-1, 1)
        )
        axes.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0).set_gid(
            f"band-{name}"
        )


def legend(figure: Figure) -> None:
    figure.legend(loc="outside lower center", ncols=2)


def _wrapped(label: str) -> str:
    """In as many lines as a column of the legend needs: what is wider than the figure would be cut off."""
    return fill(label, COLUMN)


def size_of(labels: Sequence[str]) -> tuple[float, float]:
    """The legend takes its room below the drawing, not from it."""
    lines = [_wrapped(label).count("\n") + 1 for label in labels]
    half = (len(lines) + 1) // 2
    return WIDTH, HEIGHT + LINE_HEIGHT * max(sum(lines[:half]), sum(lines[half:]))


def scale(axes: Axes, values: Sequence[float]) -> None:
    finite = [value for value in values if isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > LOG_FROM * min(finite):
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")
        axes.yaxis.set_major_formatter("{x:g}")  # by default formulas, which are not read here
        axes.yaxis.set_minor_formatter(NullFormatter())


def layer_correlation(correlations: Mapping[str, Any], name: str = "layers") -> str:
    """How well the features of each layer correlate with the other model's, before and after alignment."""
    spaces = sorted({row["space"] for row in correlations["layers"]})
    rows = {
        space: sorted(
            (row for row in correlations["layers"] if row["space"] == space),
            key=lambda row: row["layer"],
        )
        for space in spaces
    }
    said = [
        f"{space}: mean {_mean(rows[space], 'before')} before, {_mean(rows[space], 'after')} after alignment."
        for space in spaces
    ]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="layer", ylabel="mean correlation")
        for space, colour, marker in zip(spaces, cycle(SERIES[1:]), cycle(MARKERS)):
            for when, dashes, face in (("before", (0, (4, 2)), "none"), ("after", "-", colour)):
                line = [number(row[when]) for row in rows[space]]
                axes.plot(
                    [row["layer"] for row in rows[space]],
                    line,
                    color=colour,
                    linestyle=dashes,
                    marker=marker,
                    markersize=5,
                    markerfacecolor=face,
                    label=_wrapped(f"{space}, {when}"),
                )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(figure)

    size = size_of([f"{space}, before" for space in spaces for _ in range(2)])
    return draw(
        name,
        "Feature correlation per layer, before and after alignment",
        " ".join(said),
        size,
        paint,
    )


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    return short(sum(number(row[key]) for row in rows) / len(rows))


def amount(record: Mapping[str, Any], name: str = "amount") -> str:
    """The barrier against the amount of data a match has seen, with its error band; a method that needs no data is level."""
    methods = record["methods"]
    lines = [
        [Estimate.of([number(value) for value in point["barriers"]]) for point in method["points"]]
        for method in methods
    ]
    labels = [method["label"] for method in methods]
    seen = sorted(
        {float(point["samples"]) for method in methods for point in method["points"]} - {0}
    )
    said = [
        f"{label}: {estimate(line[0])} with the least data, {estimate(line[-1])} with the most."
        for label, line in zip(labels, lines, strict=True)
    ]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel=f"{record['unit']} (log scale)", ylabel="barrier")
        axes.set_xscale("log")
        for method, line, colour, marker in zip(methods, lines, cycle(SERIES), cycle(MARKERS)):
            at = [float(point["samples"]) for point in method["points"]]
            at, line = (seen, line * len(seen)) if at == [0] else (at, line)
            paint_line(axes, at, line, method["name"], method["label"], colour, marker)
        axes.set_xticks(seen, [f"{count:,.0f}" for count in seen])
        axes.xaxis.set_minor_formatter(NullFormatter())
        legend(figure)

    return draw(name, f"Barrier against {record['unit']}", " ".join(said), size_of(labels), paint)


def together(record: Mapping[str, Any], name: str = "together") -> str:
    """The barrier of the mean of more and more models, a line for each method."""
    methods = record["methods"]
    counts = [mean["count"] for mean in methods[0]["means"]]
    lines = {
        method["label"]: [number(mean["barrier"]) for mean in method["means"]] for method in methods
    }
    said = [
        f"{label}: {short(line[0])} with {counts[0]} models, {short(line[-1])} with {counts[-1]}."
        for label, line in lines.items()
    ]

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="models merged", ylabel="barrier")
        for (label, line), colour, marker in zip(lines.items(), cycle(SERIES), cycle(MARKERS)):
            axes.plot(
                counts, line, color=colour, marker=marker, markersize=3.5, label=_wrapped(label)
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        scale(axes, [value for line in lines.values() for value in line])
        legend(figure)

    return draw(
        name,
        "Barrier against the number of models merged",
        " ".join(said),
        size_of([*lines]),
        paint,
    )


def objective(
    label: str,
    runs: Sequence[Sequence[float]],
    name: str = "objective",
    *,
    each: str = "sweep",
    what: str = "objective",
) -> str:
    """What a solver brought down, sweep by sweep; one line for each pair."""
    first = runs[0]
    said = f"{len(first)} {each}s, from {short(first[0])} to {short(first[-1])}" + (
        f"; the first of {len(runs)} pairs." if len(runs) > 1 else "."
    )

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel=each, ylabel=what)
        for run in runs:
            axes.plot(
                range(1, len(run) + 1),
                run,
                color=SERIES[1],
                marker="o",
                markersize=3.5,
                alpha=max(0.3, 1 / len(runs)),
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return draw(name, f"{what.capitalize()} per {each}: {label}", said, (WIDTH, 2.8), paint)
