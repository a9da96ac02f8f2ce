"""The results of an experiment on the page: our numbers beside the published ones, and the curves behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure as Drawing

from symmerge.evaluation.estimates import Estimate
from symmerge.report.blocks import Figure, Part
from symmerge.report.drawing import SERIES, draw
from symmerge.report.figures import MARKERS, legend, paint_line, scale, size_of
from symmerge.report.phrases import estimate, short
from symmerge.report.results import number
from symmerge.report.tables import PageTable

Entry = Mapping[str, Any]
ACROSS, MORE = 2, 2.4  # panels beside one another, and inches for each further row of them


def heading(record: Mapping[str, Any]) -> str:
    """What it is about."""
    return f"{record['about'][:1].upper()}{record['about'][1:]}"


def summary(record: Mapping[str, Any]) -> str:
    """What came out, in a sentence or two."""
    entries = [entry for table in record["tables"] for entry in table["entries"]]
    known = [entry for entry in entries if entry["values"] and entry["published"] is not None]
    cells = {key for entry in entries for key in entry["cells"]}
    said = [
        f"{heading(record)} ({record['paper']}), at its {record['size']['name']} size: {len(entries)} numbers from {len(cells)} measurements."
    ]
    if known:
        below = sum(_ours(entry).mean <= entry["published"] for entry in known)
        said.append(f"{below} of {len(known)} lie at or below the published ones.")
    if record["failed"]:
        said.append(f"{len(record['failed'])} cells failed, and are missing from the means.")
    return " ".join(said)


def parts(key: str, record: Mapping[str, Any]) -> Iterator[Part]:
    """A part for every table, and what failed."""
    for at, table in enumerate(record["tables"]):
        entries = [entry for entry in table["entries"] if entry["values"]]
        text = " ".join(
            filter(
                None,
                (
                    table["about"],
                    f"What differs from the paper: {table['differs']}" if table["differs"] else "",
                ),
            )
        )
        columns = dict.fromkeys(entry["column"] for entry in entries)
        drawn = [
            _curves(
                f"{key}-table{at}-{number}",
                column,
                [entry for entry in entries if entry["column"] == column],
            )
            for number, column in enumerate(columns)
        ]
        yield Part(
            table["title"],
            text,
            figures=tuple(filter(None, drawn)),
            tables=(_table(table["title"], entries),),
        )
    if record["failed"]:
        rows = [[one["cell"], one["reason"]] for one in record["failed"]]
        yield Part(
            "What failed",
            tables=(PageTable.of("Cells that could not be computed", ["cell", "reason"], rows),),
        )
    yield Part(
        "How it was run",
        facts=(
            *((name, str(value)) for name, value in record["size"].items()),
            *_external(record.get("external")),
        ),
    )


def _external(external: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """What models were given, and with which data; by their content, as names may be anything."""
    if external:
        yield (
            "models given",
            f"{external['architecture']}: {', '.join(content[:12] for content in external['models'])}",
        )
        for part, what in (("test", "measured on"), ("train", "learned from")):
            if external[part]:
                yield what, f"{external[part]['name']} ({external[part]['content'][:12]})"


def _ours(entry: Entry) -> Estimate:
    return Estimate.of([number(value) for value in entry["values"]])


def _table(title: str, entries: Sequence[Entry]) -> PageTable:
    published = any(entry["published"] is not None for entry in entries)
    head = ["row", "on", "ours", *(["published", "difference"] if published else []), "measured on"]
    rows = []
    for entry in entries:
        ours, theirs = _ours(entry), entry["published"]
        beside = [theirs, None if theirs is None else ours.mean - theirs] if published else []
        rows.append(
            [
                entry["row"],
                entry["column"],
                ours,
                *beside,
                f"{len(entry['values'])} of {len(entry['cells'])}",
            ]
        )
    return PageTable.of(title, head, rows)


def _curves(name: str, column: str, entries: Sequence[Entry]) -> Figure | None:
    """The mean loss along the line, a line for each row that has one."""
    drawn = {
        tuple(entry["cells"]): entry for entry in reversed(entries) if entry.get("curves")
    }  # rows of the same cells have one line, the first one's
    known = {
        entry["row"]: [
            Estimate.of([number(value) for value in point])
            for point in zip(*entry["curves"], strict=True)
        ]
        for entry in entries
        if drawn.get(tuple(entry["cells"])) is entry
    }
    if not known:
        return None
    said = [
        f"{row}: {short(line[0].mean)} at the first model, {estimate(line[len(line) // 2])} in the middle, {short(line[-1].mean)} at the second."
        for row, line in known.items()
    ]

    panels = _panels(known)
    labels = dict.fromkeys(label for lines in panels.values() for label in lines)
    looks = dict(zip(labels, zip(cycle(SERIES), cycle(MARKERS)), strict=False))

    def paint(figure: Drawing) -> None:
        drawn = figure.subplots(
            -(-len(panels) // ACROSS),
            min(len(panels), ACROSS),
            sharex=True,
            sharey=True,
            squeeze=False,
        ).flatten()
        shown: set[str] = set()
        for axes, (title, lines) in zip(drawn, panels.items(), strict=False):
            axes.set_title(title, fontsize="medium")
            for label, line in lines.items():
                paint_line(
                    axes,
                    [at / (len(line) - 1) for at in range(len(line))],
                    line,
                    f"{title} {label}",
                    "" if label in shown else label,
                    *looks[label],
                )
                shown.add(label)
        for axes in drawn[len(panels) :]:
            axes.set_visible(False)
        drawn[0].set_ylabel("loss")
        scale(drawn[0], [point.mean for line in known.values() for point in line])
        for axes in drawn[max(0, len(panels) - ACROSS) : len(panels)]:
            axes.set_xlabel("t: share of the second model")
        legend(figure)

    width, height = size_of([*labels])
    svg = draw(
        name,
        f"Loss along the line, {column}",
        " ".join(said),
        (width, height + MORE * (-(-len(panels) // ACROSS) - 1)),
        paint,
    )
    return Figure.of(
        svg,
        f"{column}: loss on the straight line between the models, mean over the pairs; shaded: standard error.",
    )


def _panels(known: Mapping[str, list[Estimate]]) -> dict[str, dict[str, list[Estimate]]]:
    """Panel -> label -> line: rows called "what, by which method" have a panel for each what; others are in one. A dozen lines in one drawing tell nothing."""
    found: dict[str, dict[str, list[Estimate]]] = {}
    for row, line in known.items():
        what, _, method = row.partition(", ")
        found.setdefault(what, {})[method] = line
    grid = len(found) > 1 and all(len(lines) > 1 and "" not in lines for lines in found.values())
    return found if grid else {"": dict(known)}
