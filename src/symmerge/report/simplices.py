"""Blocks for several models: simplex.json, and maps of the barriers between all pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import fmean

from symmerge.evaluation.results import SimplexFile, SimplexRecord
from symmerge.report import figures, maps, phrases
from symmerge.report import simplex_tables as tables
from symmerge.report.blocks import Block, Figure
from symmerge.report.names import model_names
from symmerge.report.phrases import number_text
from symmerge.report.results import CurveSummary
from symmerge.report.simplex_tables import BarrierMatrix, names_of

MAX_BESIDE = 5  # more models than this: maps side by side would be unreadable


def simplex_blocks(key: str, simplex: SimplexFile) -> Iterator[Block]:
    """The blocks of simplex.json."""
    names, settings = names_of(simplex), tables.simplex_settings(simplex)
    merged = tables.merged_barriers(simplex)
    caption = "Barrier: loss of the mean of the first models, less the mean of their own losses."
    drawing = Figure.of_chart(
        f"{key}-count",
        lambda name, frame: figures.barriers_by_count(simplex, name, frame),
        caption,
    )
    enough = len(simplex.methods[0].means) > 1
    yield Block(
        "Barrier against the number of models",
        figures=(drawing,) if enough else (),
        tables=(merged,),
        shown=enough,
    )
    yield _triangle_block(key, simplex)
    yield barrier_block(names, tables.barrier_matrices(simplex), key)
    by_count = tables.barriers_by_count(simplex)
    yield Block("Barriers as numbers", phrases.explain_barriers(names), tables=(by_count,))
    if universes := tables.universes_table(simplex):
        yield Block("How they were brought together", phrases.UNIVERSE, tables=(universes,))
    yield Block(
        "How it was measured",
        tables=(tables.simplex_models(simplex),),
        long=(settings,) if settings else (),
        facts=tuple(tables.simplex_facts(simplex)),
    )


def _triangle_block(key: str, simplex: SimplexFile) -> Block:
    names = names_of(simplex)
    which = "three models" if len(names) == 3 else "the first three models"
    text = (
        f"Loss of every mixture of {', '.join(names[:2])} and {names[2]}: a model in each corner,"
        " their mean in the centre. One scale for all; no colour is the lowest loss."
    )
    drawings = zip(simplex.methods, draw_triangles(simplex, key), strict=True)
    beside = tuple(Figure.of(svg, _range_text(method)) for method, svg in drawings)
    return Block(f"The triangle of {which}", text, beside=beside)


def draw_simplex(simplex: SimplexFile) -> dict[str, str]:
    """Every figure as a file: name -> SVG text."""
    names = [re.sub(r"[^\w.-]", "-", method.name) for method in simplex.methods]
    matrices = tables.barrier_matrices(simplex)
    heat_maps = _draw_matrices(names_of(simplex), matrices)
    return {
        **{f"triangle-{n}": svg for n, svg in zip(names, draw_triangles(simplex), strict=True)},
        **{f"barriers-{n}": svg for n, svg in zip(names, heat_maps, strict=True)},
        "together": figures.barriers_by_count(simplex),
    }


def draw_triangles(simplex: SimplexFile, key: str = "simplex") -> list[str]:
    """The loss on the triangle of the first three models, by method, on one colour scale."""
    losses = [loss for method in simplex.methods for loss in _losses(method)]
    return [
        maps.plane_map(
            method.triangle.points,
            names_of(simplex)[:3],
            f"{key}-triangle{number}",
            corners=method.triangle.corners,
            scale=(min(losses), max(losses)),
            size=maps.BESIDE,
            title=f"{method.label}: loss on the triangle of three models",
        )
        for number, method in enumerate(simplex.methods)
    ]


def barrier_block(names: Sequence[str], matrices: Sequence[BarrierMatrix], key: str) -> Block:
    """Maps of the barriers of all pairs, one per method, on one colour scale."""
    drawings = tuple(
        Figure.of(svg, f"{matrix.label}: mean {number_text(fmean(_finite(matrix.pairs)))}.")
        for matrix, svg in zip(matrices, _draw_matrices(names, matrices, key), strict=True)
    )
    title = "Barriers between every two models"
    text = "Barrier over the mean on the line between every two models. One scale for all."
    numbers = (tables.pair_barriers(names, matrices),)
    if len(names) <= MAX_BESIDE:
        return Block(title, text, beside=drawings, tables=numbers)
    return Block(title, text, figures=drawings, long=numbers)


def _draw_matrices(
    names: Sequence[str], matrices: Sequence[BarrierMatrix], key: str = "simplex"
) -> list[str]:
    barriers = [barrier for matrix in matrices for barrier in _finite(matrix.pairs)]
    return [
        maps.barrier_map(
            names,
            matrix.values,
            f"{key}-barriers{number}",
            largest=max(barriers, default=0.0),
            title=f"{matrix.label}: barriers between {len(names)} models",
        )
        for number, matrix in enumerate(matrices)
    ]


def pair_matrices(curve: CurveSummary) -> tuple[list[str], list[BarrierMatrix]] | None:
    """Names and barrier matrices, if the pairs are all pairs of three models or more."""
    pairs = [(pair.a, pair.b) for pair in curve.pairs]
    models = list(dict.fromkeys(model for pair in pairs for model in pair))
    count = len(models)
    complete = len({frozenset(pair) for pair in pairs}) == len(pairs) == count * (count - 1) // 2
    if count < 3 or not complete:
        return None
    matrices = []
    for method in curve.methods:
        values = [[0.0] * count for _ in models]
        for (a, b), barrier in zip(pairs, method.barriers, strict=True):
            row, column = models.index(a), models.index(b)
            values[row][column] = values[column][row] = barrier
        matrices.append(BarrierMatrix(method.label, values))
    return model_names([model.where for model in models]), matrices


def _losses(method: SimplexRecord) -> list[float]:
    return _finite([point.metrics["loss"] for point in method.triangle.points])


def _range_text(method: SimplexRecord) -> str:
    losses = _losses(method)
    low, high = number_text(min(losses)), number_text(max(losses))
    return f"{method.label}: loss from {low} to {high}."


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if isfinite(value)]
