"""The block of kinship.json: a picture of layers by kind of tensor, and the tests as numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure as Drawing

from symmerge.lineage.likeness import KINDS
from symmerge.lineage.results import Kinship
from symmerge.report.blocks import Block, Figure
from symmerge.report.chart import WIDE, Frame
from symmerge.report.drawing import INK, RISING, draw
from symmerge.report.phrases import number_text
from symmerge.report.tables import PageTable

ABOUT = (
    "The second model was brought into the coordinates of the first by the whole symmetry group."
    " A cell compares the tensors of one kind in one layer: 1 is equal, and independent runs reach"
    " .2 to .5, because they learn similar things and alignment brings them as close as it can."
)
TESTED = (
    "The alignment did not look at what units write. Here pairs of units that can hardly be told"
    " apart by what they read are compared by what they write. Strangers win half of the pairs."
)
MANY = 12  # rows: numbers in cells would overlap beyond
ROW, AROUND = 0.34, 1.9  # inches


def kinship_blocks(key: str, evidence: Kinship) -> Iterator[Block]:
    """The picture, and the test of every layer."""
    drawing = Figure.of_chart(
        f"{key}-kinship", lambda name, frame: kinship_map(evidence, name, frame), ABOUT
    )
    yield Block("Layers by kind of tensor", figures=(drawing,), shown=True)
    columns = ("layer", "compared with", "pairs won", "pairs", "p-value")
    rows = [[one.layer, one.source, one.wins, one.pairs, one.p] for one in evidence.layers]
    facts = [
        ("p-value of independence", number_text(evidence.p)),
        ("the same of the order of units as stored", _known(evidence.p_order)),
        ("median cosine as stored", _known(evidence.before)),
        ("median cosine, undisguised", number_text(evidence.after)),
        ("A", evidence.a),
        ("B", evidence.b),
    ]
    yield Block(
        "The test",
        TESTED,
        tables=(PageTable.of("Pairs of units that agree", columns, rows),),
        facts=tuple(facts),
    )


def _known(value: float | None) -> str:
    return "cannot be compared" if value is None else number_text(value)


def kinship_map(evidence: Kinship, name: str = "kinship", frame: Frame = WIDE) -> str:
    """Likeness of every kind of tensor in every layer, as a map."""
    kinds = [kind for kind in KINDS if any(cell.kind == kind for cell in evidence.cells)]
    layers = list(dict.fromkeys(cell.layer for cell in evidence.cells))
    values = np.full((len(layers), len(kinds)), np.nan)
    for cell in evidence.cells:
        values[layers.index(cell.layer), kinds.index(cell.kind)] = cell.cosine
    labels = ["outside" if layer is None else f"layer {layer}" for layer in layers]

    def paint(figure: Drawing) -> None:
        axes = figure.add_subplot()
        axes.grid(False)
        axes.imshow(values, cmap=RISING, vmin=0.0, vmax=1.0, interpolation="none", aspect="auto")
        axes.set_xticks(range(len(kinds)), kinds, rotation=35, ha="right")
        step = max(1, len(layers) // (2 * MANY))
        axes.set_yticks(range(0, len(layers), step), labels[::step])
        if len(layers) > MANY:
            return
        for (down, across), value in np.ndenumerate(values):
            if np.isfinite(value):
                text = axes.text(across, down, f"{value:.2f}", color=INK)
                text.set(ha="center", va="center")

    a, b = evidence.names
    rows = min(len(layers), 2 * MANY)
    size = frame.width, AROUND + ROW * rows
    return draw(
        name, f"Likeness of {a} and {b}", _described(evidence), size, paint, font=frame.font
    )


def _described(evidence: Kinship) -> str:
    best = max(evidence.cells, key=lambda cell: cell.cosine)
    least = min(evidence.cells, key=lambda cell: cell.cosine)
    ends = (
        f"{cell.kind} {'outside of the layers' if cell.layer is None else f'of layer {cell.layer}'}"
        f" {cell.cosine:.2f}"
        for cell in (best, least)
    )
    return "Most alike: {}; least: {}.".format(*ends)
