"""Pictures of verdict.json: the line between two parents, or a dot for every model."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.results import LinePoint
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.report.chart import (
    LOOKS,
    POINT,
    WIDE,
    ChartLine,
    Frame,
    Look,
    Role,
    labelled_chart,
    scale_values,
    set_ticks,
)
from symmerge.report.drawing import INK, draw
from symmerge.report.names import shortened
from symmerge.report.phrases import short_number

ROW, AROUND = 2.1, 4.5  # heights in font sizes: of a row, and of what is around all
ROLE_LOOKS = {
    "parent": Look(INK, INK, 1.2, 2.0),
    "average": LOOKS["plain"],
    "merge": LOOKS["best"],
    "unhealed": LOOKS["rest"],
    "ensemble": LOOKS["rest"],
}


LINE_LABELS = {"plain": "plain average", "best": "merge"}


def verdict_dots(verdict: MergeVerdict, name: str = "verdict", frame: Frame = WIDE) -> str:
    """The loss of the merge beside its parents, their average and their ensemble."""
    rows = [(row.name, row.metrics["loss"], ROLE_LOOKS[row.kind]) for row in verdict.rows]
    places, letters = range(len(rows), 0, -1), 18 if frame.narrow else 40

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="loss")
        axes.set_yticks(places, [shortened(label, letters) for label, _, _ in rows])
        axes.set_ylim(0.4, len(rows) + 0.6)
        axes.spines["left"].set_visible(False)
        axes.tick_params(length=0)
        axes.margins(x=0.12)
        for place, (_, value, look) in zip(places, rows, strict=True):
            if isfinite(value):
                axes.plot(value, place, marker="o", markersize=9, color=look.line)
                beside = {"xytext": (10, 0), "textcoords": "offset points"}
                text = axes.annotate(short_number(value), (value, place), **beside)
                text.set(color=look.text, fontweight=look.weight, va="center")
        scale_values(axes, "x", [value for _, value, _ in rows])

    description = " ".join(f"{label}: {short_number(value)}." for label, value, _ in rows)
    size = frame.width, (AROUND + ROW * len(rows)) * frame.font * POINT
    title = "Loss of the merge and its parents"
    return draw(name, title, description, size, paint, font=frame.font)


def verdict_lines(verdict: MergeVerdict, name: str = "verdict", frame: Frame = WIDE) -> str:
    """The loss between two parents: averaged as they are, and aligned first."""
    known: dict[Role, tuple[LinePoint, ...] | None] = {
        "plain": verdict.plain_line,
        "best": verdict.aligned_line,
    }
    lines = [_line(role, points) for role, points in known.items() if points]
    parents = [row.name for row in verdict.rows if row.kind == "parent"]
    ends = [shortened(parent, 10 if frame.narrow else 32) for parent in parents]
    texts = [
        f"{line.label}: {short_number(line.values[0].mean)} at {parents[0]},"
        f" {short_number(line.labelled)} at the midpoint,"
        f" {short_number(line.values[-1].mean)} at {parents[-1]}."
        for line in lines
    ]

    def prepare(axes: Axes) -> None:
        set_ticks(axes, (0.0, 0.5, 1.0), (ends[0], "midpoint", ends[-1]))

    title = f"Loss between {parents[0]} and {parents[-1]}"
    return labelled_chart(name, title, texts, frame, ("", "loss"), lines, prepare)


def _line(role: Role, points: Sequence[LinePoint]) -> ChartLine:
    midpoint = min(range(len(points)), key=lambda at: abs(points[at].t - 0.5))
    values = [Estimate(point.metrics["loss"]) for point in points]
    ts = [point.t for point in points]
    return ChartLine(role, LINE_LABELS[role], ts, values, role, midpoint)
