"""The page of an experiment: our numbers beside the published ones, and their loss curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.experiment_results import (
    EntryRecord,
    ExperimentFile,
    ExternalRecord,
    TableRecord,
)
from symmerge.report.blocks import Block, Figure
from symmerge.report.chart import ChartLine, Frame, labelled_chart, marked, scale_axis
from symmerge.report.drawing import SERIES, draw
from symmerge.report.figures import (
    MARKERS,
    LineStyle,
    figure_size,
    legend,
    paint_line,
)
from symmerge.report.phrases import estimate_text, number_text
from symmerge.report.results import PLAIN as UNALIGNED
from symmerge.report.tables import CellValue, PageTable

Line = list[Estimate]
PANELS_PER_ROW = 2
NOT_ALIGNED = ("vanilla", "naive", "plain average")  # as the papers call it
PANEL_HEIGHT = 2.4  # inches for each further row of panels


def heading(experiment: ExperimentFile) -> str:
    """The question of the experiment, as a heading."""
    return f"{experiment.about[:1].upper()}{experiment.about[1:]}"


def summary(experiment: ExperimentFile) -> str:
    """The result in one or two sentences."""
    entries = [entry for table in experiment.tables for entry in table.entries]
    cells = {key for entry in entries for key in entry.cells}
    sentences = [
        f"{len(entries)} numbers from {len(cells)} measurements, at the {experiment.size.name} size"
        f" ({experiment.paper})."
    ]
    if experiment.failed:
        sentences.append(f"{len(experiment.failed)} cells failed, and are missing from the means.")
    return " ".join(sentences)


def at_or_below(experiment: ExperimentFile) -> tuple[int, int]:
    """How many numbers lie at or below the published ones, of how many that have one."""
    published = [
        (Estimate.of(entry.values).mean, entry.published)
        for table in experiment.tables
        for entry in table.entries
        if entry.values and entry.published is not None
    ]
    return sum(ours <= theirs for ours, theirs in published), len(published)


def experiment_blocks(key: str, experiment: ExperimentFile) -> Iterator[Block]:
    """Blocks for every table, for failures, and for how it was run."""
    for number, table in enumerate(experiment.tables):
        yield _table_block(f"{key}-table{number}", table)
    if experiment.failed:
        rows = [[failure.cell, failure.reason] for failure in experiment.failed]
        failures = PageTable.of("Cells that could not be computed", ["cell", "reason"], rows)
        yield Block("What failed", tables=(failures,))
    size = ((name, str(value)) for name, value in vars(experiment.size).items())
    external = _external_facts(experiment.external) if experiment.external else ()
    yield Block("How it was run", facts=(*size, *external))


def _table_block(key: str, table: TableRecord) -> Block:
    entries = [entry for entry in table.entries if entry.values]
    differs = f"What differs from the paper: {table.differs}" if table.differs else ""
    columns = dict.fromkeys(entry.column for entry in entries)
    drawings = (
        _line_figure(f"{key}-{number}", name, [e for e in entries if e.column == name])
        for number, name in enumerate(columns)
    )
    pictures = tuple(drawing for drawing in drawings if drawing)
    return Block(
        table.title,
        " ".join(filter(None, (table.about, differs))),
        figures=pictures,
        tables=(_page_table(table.title, entries),),
        shown=bool(pictures),
    )


def _external_facts(external: ExternalRecord) -> Iterator[tuple[str, str]]:
    """The user's models and data, identified by hash: names may be anything."""
    models = ", ".join(content[:12] for content in external.models)
    yield "models given", f"{external.architecture}: {models}"
    for name, data in (("measured on", external.test), ("learned from", external.train)):
        if data:
            yield name, f"{data.name} ({data.content[:12]})"


def _page_table(title: str, entries: Sequence[EntryRecord]) -> PageTable:
    compared = any(entry.published is not None for entry in entries)
    columns = ["row", "on", "ours", *(["published", "difference"] if compared else [])]
    rows = [_row(entry, compared=compared) for entry in entries]
    return PageTable.of(title, [*columns, "measured on"], rows)


def _row(entry: EntryRecord, *, compared: bool) -> list[CellValue]:
    ours, published = Estimate.of(entry.values), entry.published
    difference = None if published is None else ours.mean - published
    measured = f"{len(entry.values)} of {len(entry.cells)}"
    beside = [published, difference] if compared else []
    return [entry.row, entry.column, ours, *beside, measured]


def _line_figure(name: str, column: str, entries: Sequence[EntryRecord]) -> Figure | None:
    """The mean loss curve of every row that has one."""
    lines = _mean_lines(entries)
    if not lines:
        return None
    caption = (
        f"{column}: loss on the straight line between the models, mean over the pairs;"
        " shaded: standard error."
    )
    panels = _panels(lines)
    if len(panels) == 1:
        return Figure.of_chart(name, partial(_one_panel, column, lines), caption)
    labels = list(dict.fromkeys(label for of_panel in panels.values() for label in of_panel))
    width, height = figure_size(labels)
    further_rows = -(-len(panels) // PANELS_PER_ROW) - 1
    svg = draw(
        name,
        f"Loss along the line, {column}",
        " ".join(_line_text(row, line) for row, line in lines.items()),
        (width, height + PANEL_HEIGHT * further_rows),
        lambda figure: _paint_panels(figure, panels),
    )
    return Figure.of(svg, caption)


def _one_panel(column: str, lines: Mapping[str, Line], name: str, frame: Frame) -> str:
    """Labelled at the midpoint; the row without alignment has the colour of the plain average."""
    charted = [
        ChartLine(
            UNALIGNED if row in NOT_ALIGNED else row,
            row,
            _positions(line),
            line,
            anchor=len(line) // 2,
        )
        for row, line in lines.items()
    ]
    texts = [_line_text(row, line) for row, line in lines.items()]
    axes = "t: share of the second model", "loss"
    title = f"Loss along the line, {column}"
    return labelled_chart(name, title, texts, frame, axes, marked(charted), _even_ticks)


def _even_ticks(axes: Axes) -> None:
    axes.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0])


def _positions(line: Line) -> list[float]:
    return [at / (len(line) - 1) for at in range(len(line))]


def _mean_lines(entries: Sequence[EntryRecord]) -> dict[str, Line]:
    """Row -> loss curve. Rows with the same cells share one, under the first row's name."""
    drawn = {entry.cells: entry for entry in reversed(entries) if entry.curves}
    return {
        entry.row: [Estimate.of(point) for point in zip(*entry.curves, strict=True)]
        for entry in entries
        if drawn.get(entry.cells) is entry and len(entry.curves[0]) > 1
    }


def _line_text(row: str, line: Line) -> str:
    return (
        f"{row}: {number_text(line[0].mean)} at the first model,"
        f" {estimate_text(line[len(line) // 2])} at the midpoint,"
        f" {number_text(line[-1].mean)} at the second."
    )


def _panels(lines: Mapping[str, Line]) -> dict[str, dict[str, Line]]:
    """Panel -> label -> line: rows named "subject, method" have a panel per subject.

    A dozen lines in one panel would be unreadable. Other rows share one panel.
    """
    panels: dict[str, dict[str, Line]] = {}
    for row, line in lines.items():
        subject, _, method = row.partition(", ")
        panels.setdefault(subject, {})[method] = line
    is_grid = all(len(of_panel) > 1 and "" not in of_panel for of_panel in panels.values())
    return panels if len(panels) > 1 and is_grid else {"": dict(lines)}


def _paint_panels(figure: Drawing, panels: Mapping[str, Mapping[str, Line]]) -> None:
    rows, columns = -(-len(panels) // PANELS_PER_ROW), min(len(panels), PANELS_PER_ROW)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    styles: dict[str, LineStyle] = {}
    looks = zip(cycle(SERIES), cycle(MARKERS))
    for axes, (title, lines) in zip(grid, panels.items(), strict=False):
        axes.set_title(title, fontsize="medium")
        for label, line in lines.items():
            in_legend = "" if label in styles else label  # one legend entry per label
            if label not in styles:
                styles[label] = LineStyle(*next(looks))
            paint_line(axes, _positions(line), line, f"{title} {label}", in_legend, styles[label])
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    grid[0].set_ylabel("loss")
    means = [point.mean for lines in panels.values() for line in lines.values() for point in line]
    scale_axis(grid[0], means)
    for axes in grid[max(0, len(panels) - PANELS_PER_ROW) : len(panels)]:
        axes.set_xlabel("t: share of the second model")
    legend(figure)
