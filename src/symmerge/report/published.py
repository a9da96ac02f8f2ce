"""A merge with its verdict, ready to publish: a card, verdict.json, and a picture of the line."""

from __future__ import annotations

import os
from functools import partial
from io import BytesIO
from pathlib import Path

from symmerge.checkpoints.files import replacing
from symmerge.evaluation.results import LinePoint
from symmerge.merging.verdict_results import AVERAGE, MERGE, MergeVerdict
from symmerge.merging.verdict_words import markdown
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.models.saving import save

VERDICT, PICTURE = "verdict.json", "verdict.png"


def publish(
    merged: Model,
    verdict: MergeVerdict | None,
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a merge as `save` does, with verdict.json, a picture, and a card that shows both."""
    if verdict is None:
        return save(merged, target, overwrite=overwrite, progress=progress)
    return save(
        merged,
        target,
        overwrite=overwrite,
        progress=progress,
        beside=partial(write_verdict, verdict),
        quality=markdown(verdict, PICTURE if verdict.aligned_line else None),
    )


def write_verdict(verdict: MergeVerdict, folder: Path) -> None:
    """Write verdict.json, and the picture where there is a line to show."""
    verdict.write(folder / VERDICT)
    if verdict.aligned_line:
        with replacing(folder / PICTURE) as beside:
            beside.write_bytes(draw_line(verdict))


def draw_line(verdict: MergeVerdict) -> bytes:
    """A PNG of the loss between the parents, aligned and as they were."""
    from matplotlib import style
    from matplotlib.figure import Figure

    from symmerge.report.drawing import INK, MUTED, SERIES, STYLE

    with style.context(["default", {**STYLE, "figure.dpi": 150}]):
        figure = Figure(figsize=(6.4, 3.4))
        axes = figure.subplots()
        lines = ((verdict.plain_line, SERIES[0], AVERAGE), (verdict.aligned_line, SERIES[1], MERGE))
        for line, colour, kind in lines:
            if line:
                label = "averaged as they are" if kind == AVERAGE else "aligned first"
                _draw(axes, line, colour, label)
        ends = [row.name for row in verdict.of("parent")]
        axes.set_xticks([0, 0.5, 1], [ends[0], "half way", ends[1]])
        for label, side in zip(axes.get_xticklabels(), ("left", "center", "right"), strict=True):
            label.set_horizontalalignment(side)
        axes.set_ylabel("loss", color=INK)
        axes.tick_params(colors=MUTED)
        axes.margins(x=0.04, y=0.15)
        buffer = BytesIO()
        # Without a date or a version, so that equal results give equal bytes.
        figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: object, line: tuple[LinePoint, ...], colour: str, label: str) -> None:
    ts, losses = [point.t for point in line], [point.metrics["loss"] for point in line]
    axes.plot(ts, losses, "-o", color=colour, markersize=4)  # type: ignore[attr-defined]
    middle = len(ts) // 2
    axes.annotate(  # type: ignore[attr-defined]
        f"{label}: {losses[middle]:.2f}",
        (ts[middle], losses[middle]),
        (0, 7),
        textcoords="offset points",
        color=colour,
        ha="center",
        fontweight="bold",
    )
