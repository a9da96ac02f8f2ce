"""Dot plots: one number per row, on a shared axis."""

from __future__ import annotations

from math import isfinite

from matplotlib.figure import Figure

from symmerge.merging.verdict_results import MergeVerdict
from symmerge.report.chart import LOOKS, POINT, WIDE, Frame, Look, scale_values
from symmerge.report.drawing import INK, draw
from symmerge.report.names import shortened
from symmerge.report.phrases import short_number

ROW, AROUND = 2.1, 4.5  # heights in font sizes: of a row, and of what is around all
ROLE_LOOKS = {
    "parent": Look(INK, INK, 1.2, 2.0),
    "average": LOOKS["plain"],
    "merge": LOOKS["best"],
    "ensemble": LOOKS["rest"],
}


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
