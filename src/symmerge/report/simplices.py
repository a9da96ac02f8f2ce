"""Several models: what the page and the files of `barrier --together` show of simplex.json, and the barriers between all pairs of a curve.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from symmerge.report import figures, maps
from symmerge.report import phrases as words
from symmerge.report import simplex_tables as tables
from symmerge.report.blocks import Figure, Part
from symmerge.report.phrases import short
from symmerge.report.results import CurveSummary, number
from symmerge.report.simplex_tables import Matrix

FEW = 5  # models whose maps are still read beside each other


def parts(key: str, record: Mapping[str, Any]) -> Iterator[Part]:
    """All that simplex.json has, part by part."""
    names, methods = words.names(record["models"]), record["methods"]
    yield Part("Barriers", text=words.merging(names), tables=(tables.barriers(record),))
    text = f"Loss of every mixture of {', '.join(names[:2])} and {names[2]}: a model in each corner, their mean in the middle. One scale for all; no colour is the lowest loss."
    drawn = (
        Figure.of(svg, _extent(method))
        for method, svg in zip(methods, triangles(record, key), strict=True)
    )
    yield Part(
        "The triangle of three models"
        if len(names) == 3
        else "The triangle of the first three models",
        text,
        beside=tuple(drawn),
    )
    yield heat(names, [(method["label"], method["barriers"]) for method in methods], key)
    caption = "Loss of the mean of the first models, over the mean of their own losses."
    drawn = (Figure.of(figures.together(record, f"{key}-count"), caption),)
    yield Part(
        "Barrier against the number of models", figures=drawn, tables=(tables.by_count(record),)
    )
    if found := tables.universes(record):
        yield Part("How they were brought together", text=words.UNIVERSE, tables=(found,))
    settings = tables.settings(record)
    yield Part(
        "How it was measured",
        tables=(tables.models(record["models"]),),
        long=(settings,) if settings else (),
        facts=tuple(tables.facts(record)),
    )


def svgs(record: Mapping[str, Any]) -> dict[str, str]:
    """Every figure as a file: its name, and the SVG text."""
    plain = [re.sub(r"[^\w.-]", "-", method["name"]) for method in record["methods"]]
    found = {f"triangle-{name}": svg for name, svg in zip(plain, triangles(record), strict=True)}
    shown = [(method["label"], method["barriers"]) for method in record["methods"]]
    found |= {
        f"barriers-{name}": svg
        for name, svg in zip(plain, _heat_maps(words.names(record["models"]), shown), strict=True)
    }
    return found | {"together": figures.together(record)}


def triangles(record: Mapping[str, Any], key: str = "simplex") -> list[str]:
    """The loss on the triangle of the first three models, by every method on one scale."""
    losses = [loss for method in record["methods"] for loss in _losses(method)]
    scale = min(losses), max(losses)
    names = words.names(record["models"])[:3]
    return [
        maps.plane(
            method["triangle"],
            names,
            f"{key}-triangle{at}",
            scale=scale,
            size=maps.BESIDE,
            title=f"{method['label']}: loss on the triangle of three models",
        )
        for at, method in enumerate(record["methods"])
    ]


def heat(names: Sequence[str], methods: Sequence[tuple[str, Matrix]], key: str) -> Part:
    """The barriers between every two, a map for each method on one scale."""
    drawn = tuple(
        Figure.of(svg, f"{label}: mean {short(_mean(barriers))}.")
        for (label, barriers), svg in zip(methods, _heat_maps(names, methods, key), strict=True)
    )
    text = "Barrier over the mean on the line between every two models. One scale for all."
    title, numbers = "Barriers between every two models", (tables.pairs(names, methods),)
    return (
        Part(title, text, beside=drawn, tables=numbers)
        if len(names) <= FEW
        else Part(title, text, figures=drawn, long=numbers)
    )


def _heat_maps(
    names: Sequence[str], methods: Sequence[tuple[str, Matrix]], key: str = "simplex"
) -> list[str]:
    largest = max((value for _, barriers in methods for value in _pairs(barriers)), default=0.0)
    return [
        maps.barrier_map(
            names,
            barriers,
            f"{key}-barriers{at}",
            largest=largest,
            title=f"{label}: barriers between {len(names)} models",
        )
        for at, (label, barriers) in enumerate(methods)
    ]


def square(curve: CurveSummary) -> tuple[list[str], list[tuple[str, list[list[float]]]]] | None:
    """The barriers of every method as a matrix, where the pairs are all the pairs of some models, three or more; with the models' names."""
    ends = [
        tuple((pair[side]["where"], pair[side]["sha256"]) for side in ("a", "b"))
        for pair in curve.pairs
    ]
    models = list(dict.fromkeys(model for pair in ends for model in pair))
    count = len(models)
    if (
        count < 3
        or len({frozenset(pair) for pair in ends}) != len(ends)
        or len(ends) != count * (count - 1) // 2
    ):
        return None
    found = []
    for method in curve.methods:
        matrix = [[0.0] * count for _ in models]
        for (a, b), barrier in zip(ends, method.barriers, strict=True):
            matrix[models.index(a)][models.index(b)] = matrix[models.index(b)][models.index(a)] = (
                barrier
            )
        found.append((method.label, matrix))
    return words.names([{"where": where} for where, _ in models]), found


def _losses(method: Mapping[str, Any]) -> list[float]:
    return [
        loss
        for loss in (number(point["loss"]) for point in method["triangle"]["points"])
        if isfinite(loss)
    ]


def _extent(method: Mapping[str, Any]) -> str:
    losses = _losses(method)
    return f"{method['label']}: loss from {short(min(losses))} to {short(max(losses))}."


def _pairs(barriers: Matrix) -> list[float]:
    return [
        value
        for row, values in enumerate(barriers)
        for value in map(number, values[:row])
        if isfinite(value)
    ]


def _mean(barriers: Matrix) -> float:
    found = _pairs(barriers)
    return sum(found) / len(found)
