"""Heat maps and loss surfaces: results -> SVG text. Colour maps start transparent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from symmerge.evaluation.results import Corners, PlanePoint
from symmerge.models.structure import SpaceStructure
from symmerge.observation.correlations import CorrelationMatrix
from symmerge.report.drawing import INK, MUTED, RISING, SIGNED, draw, name_point
from symmerge.report.names import shortened
from symmerge.report.phrases import NO_BARRIER, element_text, number_text

EVEN: Corners = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.75**0.5))  # if distances are unknown
BESIDE = (3.2, 3.3)  # inches: three fit side by side
LEVELS = 12
MAX_CELLS = 64  # per side of a permutation matrix


def correlation_matrix(
    matrix: CorrelationMatrix,
    name: str = "matrix",
    *,
    names: Sequence[str] = ("model A", "model B"),
) -> str:
    """Correlation matrix of two models' features, with lines between heads."""
    values = np.array(matrix.values)
    largest = float(np.nanmax(np.abs(values)))

    def paint(figure: Figure) -> None:
        across, down = (f"feature of {shortened(names[at], 26)}" for at in (1, 0))
        figure.set_layout_engine("compressed")  # the default would cut the y label off
        axes = _square_axes(figure, across, down)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
        image = axes.imshow(values, cmap=SIGNED, vmin=-largest, vmax=largest, interpolation="none")
        for border in matrix.borders:
            axes.axvline(border - 0.5, color=MUTED, linewidth=0.6, gid=f"border-{border}")
            axes.axhline(border - 0.5, color=MUTED, linewidth=0.6)
        _colour_bar(figure, image, axes, "correlation")

    description = (
        f"{len(values)} by {values.shape[1]} features, in {len(matrix.borders) + 1} heads;"
        f" the largest correlation is {number_text(largest)}."
    )
    return draw(name, f"Correlation of features, {matrix.space}", description, (5.4, 4.3), paint)


def element_map(space: SpaceStructure, name: str = "element") -> str:
    """The alignment of one space as a matrix."""
    values = np.array(space.matrix) if space.index is None else _permutation_matrix(space.index)

    def paint(figure: Figure) -> None:
        size, largest = space.size * space.blocks, max(float(values.max()), 1e-12)
        axes = _square_axes(figure, "before", "after")
        axes.set_position((0.3, 0.2, 0.68, 0.68))  # equal size side by side
        image = axes.imshow(values, cmap=RISING, vmin=0.0, vmax=largest, interpolation="none")
        image.set_extent((0, size, size, 0))
        axes.set_xticks([0, size])
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
        axes.set_yticks([0, size])

    description = f"{element_text(space)} ({space.group}); {_unmoved_text(space, values)}."
    title = f"Structure of the alignment in {space.space}"
    return draw(name, title, description, (2.3, 2.3), paint)


def barrier_map(
    names: Sequence[str],
    barriers: Sequence[Sequence[float]],
    name: str = "barriers",
    *,
    largest: float | None = None,
    title: str | None = None,
) -> str:
    """Barriers of all pairs of models; `largest` is the top of a shared colour scale."""
    values = np.array(barriers)
    top = float(np.nanmax(values)) if largest is None else largest
    row, column = divmod(int(np.nanargmax(values)), len(names))

    def paint(figure: Figure) -> None:
        axes, ticks = _square_axes(figure, "", ""), range(len(names))
        high = max(top, NO_BARRIER)
        axes.imshow(values, cmap=RISING, vmin=0.0, vmax=high, interpolation="none")
        axes.set_xticks(ticks, names, rotation=45, ha="right")
        axes.set_yticks(ticks, names)
        for (down, across), value in np.ndenumerate(values):
            if np.isfinite(value):
                text = axes.text(across, down, f"{value:.2f}", color=INK, fontsize=10)
                text.set(ha="center", va="center")

    largest_text = number_text(float(values[row, column]))
    description = f"The largest, {largest_text}, is between {names[row]} and {names[column]}."
    side = max(3.0, 1.2 + 0.5 * len(names))
    title = title or f"Barriers between {len(names)} models"
    return draw(name, title, description, (side, side), paint)


def plane_map(
    points: Sequence[PlanePoint],
    names: Sequence[str] = ("A", "B", "C"),
    name: str = "plane",
    *,
    corners: Corners = EVEN,
    scale: tuple[float, float] | None = None,
    size: tuple[float, float] = (5.4, 4.2),
    title: str | None = None,
) -> str:
    """The loss on the plane through three models; `scale` is a shared colour scale."""
    losses = np.array([point.metrics["loss"] for point in points])
    # Equal models have no triangle between them.
    finite, triangle = np.isfinite(losses), np.array(corners if _spans(corners) else EVEN)
    places = (np.array([point.weights for point in points]) @ triangle)[finite]
    losses = losses[finite] if finite.any() else np.zeros(1)
    low, high = scale or (float(losses.min()), float(losses.max()))
    # At least NO_BARRIER wide: rounding must not fill the colour scale.
    levels = np.linspace(low, max(high, low + NO_BARRIER), LEVELS + 1)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot(aspect="equal")
        axes.set_axis_off()
        axes.margins(0.06)
        if not _spans(places):
            _paint_triangle(axes, triangle, names)
            return
        filled = axes.tricontourf(places[:, 0], places[:, 1], losses, levels=levels, cmap=RISING)
        _paint_triangle(axes, triangle, names)
        _colour_bar(figure, filled, axes, "loss", below=True)

    description = (
        f"The loss runs from {number_text(float(losses.min()))} to"
        f" {number_text(float(losses.max()))} over {len(losses)} points."
    )
    title = title or f"Loss on the plane through {', '.join(names)}"
    return draw(name, title, description, size, paint)


def _spans(places: np.ndarray | Corners) -> bool:
    """Whether these points of a plane are finite and do not lie on one line."""
    array = np.asarray(places, dtype=np.float64)
    if len(array) < 3 or not (np.abs(array) < 1e12).all():
        return False
    spread = np.linalg.svd(array - array.mean(0), compute_uv=False)
    return bool(spread[1] > 1e-6 * spread[0])


def _paint_triangle(axes: Axes, corners: np.ndarray, names: Sequence[str]) -> None:
    axes.plot(*corners[[0, 1, 2, 0]].T, color=MUTED, linewidth=0.8)
    for (x, y), label, height in zip(corners, names, (-11.0, -11.0, 10.0), strict=True):
        axes.plot(x, y, marker="o", color=INK, clip_on=False)
        name_point(axes, (float(x), float(y)), label, (0.0, height))


def _square_axes(figure: Figure, xlabel: str, ylabel: str) -> Axes:
    axes = figure.add_subplot(aspect="equal", xlabel=xlabel, ylabel=ylabel)
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(True)
    return axes


def _colour_bar(
    figure: Figure, image: ScalarMappable, axes: Axes, label: str, *, below: bool = False
) -> None:
    place = {"location": "bottom", "aspect": 30} if below else {"location": "right", "aspect": 20}
    bar = figure.colorbar(image, ax=axes, label=label, shrink=0.85, ticks=MaxNLocator(5), **place)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # one small image instead of 256 shapes with visible seams


def _permutation_matrix(index: Sequence[int]) -> np.ndarray:
    """The permutation matrix; large ones are pooled to counts per block."""
    size = len(index)
    cells, limits = min(size, MAX_CELLS), ((0, size), (0, size))
    counts, _, _ = np.histogram2d(np.arange(size), np.array(index), bins=cells, range=limits)
    return counts


def _unmoved_text(space: SpaceStructure, values: np.ndarray) -> str:
    if space.index is not None:
        return f"{sum(at == source for at, source in enumerate(space.index))} stay in place"
    share = (np.diag(values) ** 2).sum() / max(float((values**2).sum()), 1e-30)
    return f"{share:.0%} of its energy lies on the diagonal, where nothing moves"
