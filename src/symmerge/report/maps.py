"""Figures with areas: results -> SVG text. Colours run from transparent, so they read on light and on dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from symmerge.report import phrases as words
from symmerge.report.drawing import INK, MUTED, RISING, SIGNED, draw
from symmerge.report.phrases import short
from symmerge.report.results import number

EVEN = (
    (0.0, 0.0),
    (1.0, 0.0),
    (0.5, 0.75**0.5),
)  # where the corners lie if their distances were not measured
BESIDE = (3.2, 3.3)  # inches: three of these fit beside each other
LEVELS = 12
LARGEST = 64  # cells along a side of a permutation's picture


def correlation_matrix(matrix: Mapping[str, Any], name: str = "matrix") -> str:
    """How the features of two models correlate, with a line wherever a head ends."""
    values = _array(matrix["values"])
    largest = float(np.nanmax(np.abs(values)))

    def paint(figure: Figure) -> None:
        axes = _square(figure, "feature of model B", "feature of model A")
        image = axes.imshow(values, cmap=SIGNED, vmin=-largest, vmax=largest, interpolation="none")
        for border in matrix["borders"]:
            axes.axvline(border - 0.5, color=MUTED, linewidth=0.6, gid=f"border-{border}")
            axes.axhline(border - 0.5, color=MUTED, linewidth=0.6)
        _bar(figure, image, axes, "correlation")

    said = f"{len(values)} by {values.shape[1]} features, in {len(matrix['borders']) + 1} heads; the largest correlation is {short(largest)}."
    return draw(name, f"Correlation of features, {matrix['space']}", said, (5.4, 4.3), paint)


def element(space: Mapping[str, Any], name: str = "element") -> str:
    """What an alignment does to one space: which coordinate goes where, and how much."""
    values = (
        _permutation(space["index"]) if space["kind"] == "permutation" else _array(space["matrix"])
    )

    def paint(figure: Figure) -> None:
        size = space["size"] * space.get("blocks", 1)
        axes = _square(figure, "before", "after")
        axes.set_position((0.3, 0.2, 0.68, 0.68))  # pictures side by side are equally large
        axes.imshow(
            values,
            cmap=RISING,
            vmin=0.0,
            vmax=max(float(values.max()), 1e-12),
            interpolation="none",
            extent=(0, size, size, 0),
        )
        axes.set_xticks([0, size])
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
        axes.set_yticks([0, size])

    said = f"{words.element(space)} ({space['group']}); {_stays(space, values)}."
    return draw(name, f"Structure of the alignment in {space['space']}", said, (2.3, 2.3), paint)


def barrier_map(
    names: Sequence[str],
    barriers: Sequence[Sequence[float | None]],
    name: str = "barriers",
    *,
    largest: float | None = None,
    title: str | None = None,
) -> str:
    """The barrier between every two of several models; `largest` has the full colour, for maps that are compared."""
    values = _array(barriers)
    top = float(np.nanmax(values)) if largest is None else largest
    row, column = divmod(int(np.nanargmax(values)), len(names))

    def paint(figure: Figure) -> None:
        axes = _square(figure, "", "")
        axes.imshow(
            values, cmap=RISING, vmin=0.0, vmax=max(top, words.NO_BARRIER), interpolation="none"
        )
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        for (down, across), value in np.ndenumerate(values):
            if np.isfinite(value):
                axes.text(
                    across, down, f"{value:.2f}", ha="center", va="center", color=INK, fontsize=10
                )

    said = f"The largest, {short(float(values[row, column]))}, is between {names[row]} and {names[column]}."
    side = max(3.0, 1.2 + 0.5 * len(names))
    return draw(name, title or f"Barriers between {len(names)} models", said, (side, side), paint)


def plane(
    record: Mapping[str, Any],
    names: Sequence[str] = ("A", "B", "C"),
    name: str = "plane",
    *,
    scale: tuple[float, float] | None = None,
    size: tuple[float, float] = (5.4, 4.2),
    title: str | None = None,
) -> str:
    """The loss on the plane through three models, drawn with the triangle that has a model in each corner; `scale` is for planes that are compared."""
    weights = np.array([point["weights"] for point in record["points"]], dtype=float)
    losses = _array([point["loss"] for point in record["points"]])
    kept = np.isfinite(losses)
    corners = np.array(record.get("corners", EVEN))
    at, losses = (weights @ corners)[kept], losses[kept]
    low, high = scale or (float(losses.min()), float(losses.max()))
    levels = np.linspace(
        low, max(high, low + words.NO_BARRIER), LEVELS + 1
    )  # what is as good as flat has one colour

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(aspect="equal")
        axes.set_axis_off()
        axes.margins(0.06)
        filled = axes.tricontourf(at[:, 0], at[:, 1], losses, levels=levels, cmap=RISING)
        axes.plot(*corners[[0, 1, 2, 0]].T, color=MUTED, linewidth=0.8)
        for corner, label, offset in zip(
            corners, names, ((0, -11), (0, -11), (0, 10)), strict=True
        ):
            axes.plot(*corner, marker="o", color=INK, clip_on=False)
            axes.annotate(
                label,
                (corner[0], corner[1]),
                offset,
                textcoords="offset points",
                ha="center",
                va="center",
                fontweight="bold",
                annotation_clip=False,
            )
        _bar(figure, filled, axes, "loss", below=True)

    said = f"The loss runs from {short(float(losses.min()))} to {short(float(losses.max()))} over {len(losses)} points."
    return draw(name, title or f"Loss on the plane through {', '.join(names)}", said, size, paint)


def _square(figure: Figure, xlabel: str, ylabel: str) -> Axes:
    axes = figure.add_subplot(aspect="equal", xlabel=xlabel, ylabel=ylabel)
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(True)
    return axes


def _bar(
    figure: Figure, image: ScalarMappable, axes: Axes, label: str, *, below: bool = False
) -> None:
    bar = figure.colorbar(
        image,
        ax=axes,
        label=label,
        shrink=0.85,
        ticks=MaxNLocator(5),
        location="bottom" if below else "right",
        aspect=30 if below else 20,
    )
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # one small image, not 256 shapes with seams


def _array(values: Any) -> np.ndarray:
    array = np.array(values, dtype=object)
    return np.vectorize(number, otypes=[float])(array)


def _permutation(index: Sequence[int]) -> np.ndarray:
    """The permutation matrix, or how many coordinates go from each block to each block where it is large."""
    size = len(index)
    cells = min(size, LARGEST)
    counts, _, _ = np.histogram2d(
        np.arange(size), np.array(index), bins=cells, range=((0, size), (0, size))
    )
    return counts


def _stays(space: Mapping[str, Any], values: np.ndarray) -> str:
    if space["kind"] == "permutation":
        return f"{sum(at == source for at, source in enumerate(space['index']))} stay in place"
    share = (np.diag(values) ** 2).sum() / max(float((values**2).sum()), 1e-30)
    return f"{share:.0%} of its energy lies on the diagonal, where nothing moves"
