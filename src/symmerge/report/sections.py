"""What the page shows for one experiment; what was not measured has no part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from symmerge.report import experiment, figures, maps, tables
from symmerge.report import phrases as words
from symmerge.report import simplex_tables as together_tables
from symmerge.report import simplices as together
from symmerge.report.blocks import Figure, Part
from symmerge.report.results import CurveSummary, Results, number, whole

FEW = 6  # pictures of spaces that are shown at once; the others unfold


@dataclass(frozen=True)
class Measured:
    """What was measured between the models."""

    curve: CurveSummary
    loss: Figure
    barriers: tables.PageTable
    points: tables.PageTable


@dataclass(frozen=True)
class Section:
    """One experiment on the page; where nothing was measured between two models, it has no path."""

    key: str
    name: str
    title: str
    summary: str
    barriers: tuple[tables.Row, ...]
    path: Measured | None
    parts: tuple[Part, ...]


def section(key: str, results: Results, *, named: bool) -> Section:
    """A folder's results; `key` makes its ids unique, and it is `named` where it is not alone."""
    name, path = results.folder.resolve().name, _path(key, results.curve) if results.curve else None
    title, summary, barriers = _head(results)
    return Section(
        key,
        name,
        f"{name}: {title}" if named else title,
        summary,
        barriers,
        path,
        tuple(_parts(key, results)),
    )


def _head(results: Results) -> tuple[str, str, tuple[tables.Row, ...]]:
    """What it is, what came out, and the barriers for the overview."""
    curve, simplex, solution = results.curve, results.simplex, results.solution
    if curve:
        barriers = tuple(
            (method.label, method.barrier_mean, method.barrier_linear) for method in curve.methods
        )
        return words.task_title(curve.task), words.summary(curve), barriers
    if simplex:
        with whole(results.folder / "simplex.json"):
            return (
                f"{words.task_title(simplex['task'])}, {len(simplex['models'])} models",
                words.together(simplex),
                together_tables.overview(simplex),
            )
    if results.experiment:
        with whole(results.folder / "results.json"):
            return (
                f"{results.experiment['name']}: {results.experiment['paper']}",
                experiment.summary(results.experiment),
                (),
            )
    if solution:
        with whole(results.folder / "solution.json"):
            return "Alignment of two models", words.closer(solution), ()
    assert results.universe, (
        "a folder has a curve, a simplex, an experiment, a solution or a universe"
    )
    with whole(results.folder / "universe.json"):
        return (
            f"Alignment of {len(results.universe['models'])} models",
            words.gathered(results.universe),
            (),
        )


def _path(key: str, curve: CurveSummary) -> Measured:
    shade = "; shaded: standard error over the pairs" if len(curve.pairs) > 1 else ""
    loss = Figure.of(
        figures.metric_curve(curve, "loss", f"{key}-loss"),
        f"Loss on the straight path from model A (t = 0) to model B (t = 1){shade}.",
    )
    return Measured(curve, loss, tables.barriers(curve), tables.points(curve))


def _parts(key: str, results: Results) -> Iterator[Part]:
    curve = results.curve
    if curve and (others := curve.metrics[1:]):
        drawn = (
            Figure.of(
                figures.metric_curve(curve, metric, f"{key}-metric{at}"),
                f"{metric} on the same path.",
            )
            for at, metric in enumerate(others)
        )
        yield Part("Other metrics", figures=tuple(drawn))
    if curve:
        with whole(results.folder / "curve.json"):
            found = together.square(curve)
        if found:
            yield together.heat(*found, key)
    if results.simplex:
        with whole(results.folder / "simplex.json"):
            many = list(together.parts(f"{key}-many", results.simplex))
        yield from many
    if results.experiment:
        with whole(results.folder / "results.json"):
            tabled = list(experiment.parts(f"{key}-experiment", results.experiment))
        yield from tabled
    if results.amount:
        with whole(results.folder / "amount.json"):
            part = _amount(key, results.amount)
        yield part
    if results.correlations:
        with whole(results.folder / "correlations.json"):
            part = _correlations(key, results.correlations)
        yield part
    if results.structure:
        with whole(results.folder / "structure.json"):
            part = _structure(key, results.structure)
        yield part
    with whole(results.folder / "solution.json"):
        search = list(_search(key, results))
    yield from search
    if results.universe:
        with whole(results.folder / "universe.json"):
            part = _rounds(key, results.universe)
        yield part
    if not curve:
        return
    with whole(results.folder / "curve.json"):
        part = Part(
            "How it was measured",
            tables=tuple(filter(None, (tables.models(curve), tables.settings(curve)))),
            facts=tuple(tables.facts(curve)),
        )
    yield part


def _correlations(key: str, record: Mapping[str, Any]) -> Part:
    drawn = [
        Figure.of(
            figures.layer_correlation(record, f"{key}-layers"),
            "How alike the two models' features are, layer by layer: the closer to 1, the better.",
        )
    ]
    if "matrix" in record:
        which = f", {record['matrix']['features']}" if "features" in record["matrix"] else ""
        caption = (
            f"Correlations in {record['matrix']['space']}{which}; lines mark where a head ends."
        )
        drawn.append(Figure.of(maps.correlation_matrix(record["matrix"], f"{key}-matrix"), caption))
    return Part("Feature correlation", figures=tuple(drawn), tables=(tables.correlations(record),))


def _amount(key: str, record: Mapping[str, Any]) -> Part:
    caption = f"Barrier over the mean against how many {record['unit']} the match has seen; shaded: standard error over the pairs."
    return Part(
        "Amount of data",
        figures=(Figure.of(figures.amount(record, f"{key}-amount"), caption),),
        tables=(tables.amount(record),),
    )


def _structure(key: str, record: Mapping[str, Any]) -> Part:
    drawn = tuple(
        Figure.of(
            maps.element(space, f"{key}-space{at}"), f"{space['space']}: {words.element(space)}"
        )
        for at, space in enumerate(record["spaces"])
    )
    text = "Where each coordinate of model B goes. A diagonal would mean that nothing moves."
    return Part(
        "Structure of the alignment",
        text,
        small=drawn[:FEW],
        folded=drawn[FEW:],
        tables=(tables.spaces(record),),
    )


def _rounds(key: str, record: Mapping[str, Any]) -> Part:
    spreads = tuple(map(number, record["spreads"]))
    caption = "How far the models lie from their mean, over their own size: aligned to the reference, and after every round."
    drawn = Figure.of(
        figures.objective("spread", (spreads,), f"{key}-spread", each="round", what="spread"),
        caption,
    )
    facts = {
        "models": ", ".join(record["models"]),
        "moved in each round": record["moved"],
        "circles close to": record["cycle_error"],
        **record["settings"],
    }
    return Part(
        "The rounds",
        figures=(drawn,),
        facts=tuple((name, tables.as_given(value)) for name, value in facts.items()),
    )


def _search(key: str, results: Results) -> Iterator[Part]:
    methods = results.curve.methods if results.curve else ()
    runs = {method.label: method.objectives for method in methods if method.objectives}
    solution, known = results.solution, any(method.settings for method in methods)
    if solution and not runs:
        runs = {"alignment": (tuple(map(number, solution["objective"])),)}
    if not runs and not solution:
        return
    drawn = (
        Figure.of(
            figures.objective(label, run, f"{key}-objective{at}"), f"{label}: objective per sweep."
        )
        for at, (label, run) in enumerate(runs.items())
        if all(run)
    )
    yield Part(
        "The search",
        text=words.distances(solution) if solution else "",
        figures=tuple(drawn),
        tables=(tables.by_space(solution),) if solution else (),
        facts=tuple((name, tables.as_given(value)) for name, value in solution["settings"].items())
        if solution and not known
        else (),
    )
