"""Line charts with a label for every line beside the axes, instead of a legend of colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from textwrap import wrap
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from scipy.optimize import isotonic_regression

from symmerge.evaluation.estimates import Estimate
from symmerge.report.drawing import BEST, INK, MUTED, PLAIN, REST, draw
from symmerge.report.phrases import short_number
from symmerge.report.results import PLAIN as UNALIGNED

Role = Literal["best", "plain", "rest", "ensemble"]
POINT = 1 / 72  # inches
LEADING = 1.3  # height of a line of text, in font sizes
GUTTER = 0.25  # inches between the axes and the numbers, for the leaders
LETTER, DIGIT = 0.66, 0.67  # widths in font sizes
MAX_LINES = 3  # of one label; longer ones are cut
LOG_FROM = 20.0  # ratio of the values beyond which a linear axis would flatten all lines but one


@dataclass(frozen=True)
class Look:
    """Colours and width of a line; the best is drawn last, above the others."""

    line: str
    text: str
    width: float
    order: float
    weight: str = "normal"


LOOKS: dict[Role, Look] = {
    "rest": Look(REST, MUTED, 1.3, 2.0),
    "ensemble": Look(INK, INK, 1.2, 2.1),
    "plain": Look(PLAIN, PLAIN, 2.0, 2.2),
    "best": Look(BEST, BEST, 2.8, 2.3, "bold"),
}


@dataclass(frozen=True)
class ChartLine:
    """One line: its name in the SVG, its label for people, and the point that is labelled."""

    name: str
    label: str
    x: Sequence[float]
    values: Sequence[Estimate]
    role: Role = "rest"
    anchor: int = -1

    @property
    def labelled(self) -> float:
        """The value at the labelled point."""
        return self.values[self.anchor].mean


@dataclass(frozen=True)
class Frame:
    """Sizes of a chart in inches; `letters` of a label fit on a line of its column.

    `right` is the column of numbers and labels, `number` its part with the numbers.
    """

    width: float
    height: float
    left: float
    right: float
    font: float
    letters: int
    narrow: bool = False
    number: float = 0.0
    top: float = 0.38
    bottom: float = 0.62


# One drawing per width of screen: scaled to a phone, the text of the wide one would be 5 px high.
WIDE = Frame(width=11.4, height=5.0, left=0.62, right=2.7, font=12.5, letters=24)
NARROW = Frame(width=4.97, height=4.4, left=0.46, right=1.98, font=10.5, letters=15, narrow=True)


def frame_for(frame: Frame, lines: Sequence[ChartLine]) -> Frame:
    """The frame with room for the labels: as wide as the longest, one below the other."""
    labels = [_wrapped(line.label, frame) for line in lines]
    numbers = [short_number(line.labelled) for line in lines]
    font = frame.font * POINT
    number = max(map(len, numbers)) * DIGIT * font + 0.06
    longest = max(len(text) for label in labels for text in label)
    right = GUTTER + number + longest * LETTER * font
    height = sum(map(_size, labels)) * font + frame.top + frame.bottom
    return replace(frame, height=max(frame.height, height), right=right, number=number)


@dataclass(frozen=True)
class Chart:
    """Axes of a figure, with room for labels on their right."""

    figure: Figure
    axes: Axes
    frame: Frame

    @staticmethod
    def on(figure: Figure, frame: Frame, xlabel: str, ylabel: str) -> Chart:
        """The y label stands above its axis: nobody reads sideways."""
        size = frame.width, frame.height
        width, height = size[0] - frame.left - frame.right, size[1] - frame.top - frame.bottom
        figure.set_layout_engine("none")
        left, bottom, wide, high = np.array([frame.left, frame.bottom, width, height]) / (size * 2)
        axes = figure.add_axes((left, bottom, wide, high))
        axes.set_xlabel(xlabel, color=MUTED)
        axes.set_ylabel(ylabel, rotation=0, ha="left", va="bottom", fontweight="bold")
        axes.yaxis.set_label_coords(-frame.left / width, 1 + 0.1 / height)
        axes.spines["left"].set_visible(False)
        axes.tick_params(length=0, pad=5)
        axes.grid(visible=False, axis="x")
        return Chart(figure, axes, frame)

    def paint(self, lines: Sequence[ChartLine]) -> None:
        """Draw the lines, and their labels in the order of their heights."""
        for line in lines:
            _paint_line(self.axes, line)
        scale_axis(self.axes, [value.mean for line in lines for value in line.values])
        self.axes.autoscale_view()  # before places are computed
        box, frame = self.axes.get_position(), self.frame
        low, high = box.y0 * frame.height, box.y1 * frame.height + frame.top / 2
        heights = [self._height(line.labelled, high) for line in lines]
        order = sorted(range(len(lines)), key=lambda number: heights[number])
        texts = [_wrapped(lines[number].label, frame) for number in order]
        sizes = [_size(text) * frame.font * POINT for text in texts]
        places = spread([heights[number] for number in order], sizes, low, high)
        for number, text, place in zip(order, texts, places, strict=True):
            line, value = lines[number], lines[number].labelled
            if isfinite(value):
                start = None if line.role == "ensemble" else line.x[line.anchor]
                self._lead(start, (heights[number], place), line.role)
            self._write(place, text, short_number(value), LOOKS[line.role])

    def _lead(self, x: float | None, heights: tuple[float, float], role: Role) -> None:
        """A thin line from a dot, or from the edge of the axes, to a label."""
        edge, (start, end) = self.frame.width - self.frame.right, heights
        left = edge if x is None else self._inches(x, self.axes.get_ylim()[0])[0]
        path = [left, edge + 0.04, edge + GUTTER - 0.04], [start, start, end]
        width = 0.45 if role == "rest" else 0.9
        thin = {"linewidth": width, "zorder": -1.0, "solid_joinstyle": "round"}
        unit = self.figure.dpi_scale_trans
        self.figure.add_artist(Line2D(*path, transform=unit, color=LOOKS[role].line, **thin))

    def _write(self, height: float, text: Sequence[str], number: str, look: Look) -> None:
        """The number, and beside it the label."""
        left = self.frame.width - self.frame.right + GUTTER
        middle = left + self.frame.number
        unit = self.figure.dpi_scale_trans
        value = self.figure.text(middle - 0.06, height, number, ha="right", transform=unit)
        label = self.figure.text(middle, height, "\n".join(text), ha="left", transform=unit)
        for one in (value, label):
            one.set(color=look.text, fontweight=look.weight, va="center_baseline")
            one.set_linespacing(LEADING - 0.15)

    def _inches(self, x: float, y: float) -> tuple[float, float]:
        """Inches from the lower left corner of the figure."""
        across, up = self.axes.transData.transform((x, y))
        return float(across) * POINT, float(up) * POINT

    def _height(self, value: float, otherwise: float) -> float:
        left = self.axes.get_xlim()[0]
        return self._inches(left, value)[1] if isfinite(value) else otherwise


def _paint_line(axes: Axes, line: ChartLine) -> None:
    x, means, look = line.x, [value.mean for value in line.values], LOOKS[line.role]
    style = (0, (5, 3)) if line.role == "ensemble" else "-"
    drawn = {"color": look.line, "linewidth": look.width, "linestyle": style}
    axes.plot(x, means, **drawn, zorder=look.order, solid_capstyle="round", gid=f"line-{line.name}")
    if line.role != "ensemble":
        dot = {"marker": "o", "markersize": 4 + look.width, "color": look.line}
        axes.plot(x[line.anchor], means[line.anchor], **dot, zorder=look.order)
    if line.values[0].error is not None and line.role != "ensemble":
        low, high = ([v.mean + side * (v.error or 0.0) for v in line.values] for side in (-1, 1))
        band = axes.fill_between(x, low, high, color=look.line, alpha=0.18, linewidth=0)
        band.set_gid(f"band-{line.name}")


def scale_axis(axes: Axes, values: Sequence[float]) -> None:
    """Scale the y axis; a log scale if the values span too much for a linear one."""
    scale_values(axes, "y", values)


def scale_values(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Set a log scale, with numbers as labels, if the values span too much for a linear one."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    finite = [value for value in values if isfinite(value)]
    # Margins of a log axis overflow near the ends of what a float holds.
    fits = finite and min(finite) > 1e-99 and max(finite) < 1e99
    if fits and max(finite) > LOG_FROM * min(finite):
        axes.set(**{f"{which}scale": "log"})
        axis.label.set_text(f"{axis.label.get_text()} (log scale)")  # stays where it is
        few_decades = max(finite) < 300 * min(finite)
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few_decades else (1.0,)))
        axis.set_major_formatter("{x:g}")  # the default uses mathtext, which is off
        axis.set_minor_formatter(NullFormatter())
        axis.set_tick_params(which="minor", length=0)
    else:
        axis.set_major_locator(MaxNLocator(6))


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres of boxes of these sizes, in order and apart, as close as can be to where `wanted`.

    >>> [round(at, 2) for at in spread([1.0, 1.0, 5.0], [1.0, 1.0, 1.0], 0.0, 6.0)]
    [0.5, 1.5, 5.0]
    """
    gaps = [0.0, *((a + b) / 2 for a, b in pairwise(sizes))]
    offsets = np.cumsum(gaps)
    free = isotonic_regression(np.array(wanted) - offsets).x
    lowest, highest = low + sizes[0] / 2, high - sizes[-1] / 2 - float(offsets[-1])
    fitted = np.clip(free, lowest, max(lowest, highest))
    return [float(at) for at in fitted + offsets]


def _size(lines: Sequence[str]) -> float:
    """Height of a label in font sizes; those of several lines keep a little distance."""
    return len(lines) * LEADING + (0.35 if len(lines) > 1 else 0.0)


def _wrapped(label: str, frame: Frame) -> list[str]:
    lines = wrap(label, frame.letters) or [""]
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 1], lines[MAX_LINES - 1][: frame.letters - 1] + "…"]


def set_ticks(axes: Axes, places: Sequence[float], texts: Sequence[str]) -> None:
    """Both ends and the midpoint, with texts that stay within the axes."""
    axes.set_xticks(places, texts)
    for label, side in zip(axes.get_xticklabels(), ("left", "center", "right"), strict=True):
        label.set(ha=side, linespacing=1.4)


def marked(lines: Iterable[ChartLine]) -> list[ChartLine]:
    """The lines with their roles: the lowest is the best, unless it is the plain average."""
    known = list(lines)
    finite = [line for line in known if isfinite(line.labelled)]
    best = min(finite, key=lambda line: line.labelled, default=None)
    roles: dict[str, Role] = {**({best.name: "best"} if best else {}), UNALIGNED: "plain"}
    return [replace(line, role=roles.get(line.name, "rest")) for line in known]


def labelled_chart(
    name: str,
    title: str,
    description: Sequence[str],
    frame: Frame,
    labels: tuple[str, str],
    lines: Sequence[ChartLine],
    prepare: Callable[[Axes], None],
) -> str:
    """A chart with its own axes: `labels` of x and y; `prepare` sets up the x axis."""
    frame = frame_for(frame, lines)

    def paint(figure: Figure) -> None:
        chart = Chart.on(figure, frame, *labels)
        prepare(chart.axes)
        chart.paint(lines)

    size = frame.width, frame.height
    return draw(name, title, " ".join(description), size, paint, font=frame.font)
