"""The section of one folder on the page: a block for each result that exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from symmerge.errors import SymmergeError
from symmerge.evaluation.experiment_results import AmountFile
from symmerge.models.alignment_results import UniverseFile
from symmerge.models.structure import StructureFile
from symmerge.observation.correlations import Correlations
from symmerge.report import experiment, figures, maps, phrases, simplex_tables, tables
from symmerge.report.blocks import Block, Figure
from symmerge.report.results import CurveSummary, Results
from symmerge.report.simplices import barrier_block, pair_matrices, simplex_blocks

MAX_SPACES = 6  # figures of spaces shown at first; the others are folded


@dataclass(frozen=True)
class MeasuredPath:
    """The measured line between two models, or over several pairs."""

    curve: CurveSummary
    loss: Figure
    barriers: tables.PageTable
    points: tables.PageTable


@dataclass(frozen=True, kw_only=True)
class Section:
    """One folder on the page; `path` is set where the line between two models was measured."""

    key: str
    name: str
    title: str
    summary: str
    barriers: tuple[tables.BarrierRow, ...]
    path: MeasuredPath | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class _Head:
    """Title and summary of a folder, and its barriers for the overview."""

    title: str
    summary: str
    barriers: tuple[tables.BarrierRow, ...] = ()


def build_section(key: str, results: Results, *, named: bool) -> Section:
    """The section of a folder; `key` makes ids unique, `named` puts the folder in the title."""
    name = results.folder.resolve().name
    try:
        head = _head(results)
        path = _measured_path(key, results.curve) if results.curve else None
        blocks = tuple(_blocks(key, results))
    except (KeyError, IndexError, ValueError) as error:  # lengths or metrics that do not agree
        raise SymmergeError(
            f"the results in {results.folder} do not fit together ({error!r}): write them again"
        ) from error
    return Section(
        key=key,
        name=name,
        title=f"{name}: {head.title}" if named else head.title,
        summary=head.summary,
        barriers=head.barriers,
        path=path,
        blocks=blocks,
    )


def _head(results: Results) -> _Head:
    if curve := results.curve:
        barriers = [
            tables.BarrierRow(method.label, method.barrier_mean, method.barrier_linear)
            for method in curve.methods
        ]
        title = phrases.task_title(curve.task)
        return _Head(title, phrases.curve_summary(curve), tuple(barriers))
    if simplex := results.simplex:
        title = f"{phrases.task_title(simplex.task)}, {len(simplex.models)} models"
        barriers = simplex_tables.barrier_rows(simplex)
        return _Head(title, phrases.simplex_summary(simplex), barriers)
    if record := results.experiment:
        return _Head(f"{record.name}: {record.paper}", experiment.summary(record))
    if solution := results.solution:
        return _Head("Alignment of two models", phrases.solution_summary(solution))
    universe = results.universe
    assert universe, "a folder has a main file"
    title = f"Alignment of {len(universe.models)} models"
    return _Head(title, phrases.universe_summary(universe))


def _measured_path(key: str, curve: CurveSummary) -> MeasuredPath:
    shade = "; shaded: standard error over the pairs" if len(curve.pairs) > 1 else ""
    loss = Figure.of(
        figures.metric_curve(curve, "loss", f"{key}-loss"),
        f"Loss on the straight path from model A (t = 0) to model B (t = 1){shade}.",
    )
    return MeasuredPath(curve, loss, tables.curve_barriers(curve), tables.curve_points(curve))


def _blocks(key: str, results: Results) -> Iterator[Block]:
    if results.curve:
        yield from _curve_blocks(key, results.curve)
    if results.simplex:
        yield from simplex_blocks(f"{key}-many", results.simplex)
    if results.experiment:
        yield from experiment.experiment_blocks(f"{key}-experiment", results.experiment)
    if results.amount:
        yield _amount_block(key, results.amount)
    if results.correlations:
        yield _correlations_block(key, results.correlations)
    if results.structure:
        yield _structure_block(key, results.structure)
    yield from _search_block(key, results)
    if results.universe:
        yield _rounds_block(key, results.universe)
    if results.curve:
        yield _method_block(results.curve)


def _curve_blocks(key: str, curve: CurveSummary) -> Iterator[Block]:
    if others := curve.metrics[1:]:
        drawings = tuple(
            Figure.of(
                figures.metric_curve(curve, metric, f"{key}-metric{number}"),
                f"{metric} on the same path.",
            )
            for number, metric in enumerate(others)
        )
        yield Block("Other metrics", figures=drawings)
    if matrices := pair_matrices(curve):
        yield barrier_block(*matrices, key)


def _method_block(curve: CurveSummary) -> Block:
    settings = tables.settings_table({method.label: method.settings for method in curve.methods})
    return Block(
        "How it was measured",
        tables=(tables.pair_models(curve), *((settings,) if settings else ())),
        facts=tuple(tables.curve_facts(curve)),
    )


def _correlations_block(key: str, correlations: Correlations) -> Block:
    drawings = [
        Figure.of(
            figures.layer_correlation(correlations, f"{key}-layers"),
            "How alike the two models' features are, layer by layer: the closer to 1, the better.",
        )
    ]
    if matrix := correlations.matrix:
        which = f", {matrix.features}" if matrix.features else ""
        caption = f"Correlations in {matrix.space}{which}; lines mark where a head ends."
        drawings.append(Figure.of(maps.correlation_matrix(matrix, f"{key}-matrix"), caption))
    table = tables.correlations_table(correlations)
    return Block("Feature correlation", figures=tuple(drawings), tables=(table,))


def _amount_block(key: str, amount: AmountFile) -> Block:
    caption = (
        f"Barrier over the mean against the number of {amount.unit} used for matching;"
        " shaded: standard error over the pairs."
    )
    drawing = Figure.of(figures.amount_curve(amount, f"{key}-amount"), caption)
    return Block("Amount of data", figures=(drawing,), tables=(tables.amount_table(amount),))


def _structure_block(key: str, structure: StructureFile) -> Block:
    drawings = tuple(
        Figure.of(
            maps.element_map(space, f"{key}-space{number}"),
            f"{space.space}: {phrases.element_text(space)}",
        )
        for number, space in enumerate(structure.spaces)
    )
    return Block(
        "Structure of the alignment",
        "Where each coordinate of model B goes. A diagonal means that nothing moves.",
        small=drawings[:MAX_SPACES],
        folded=drawings[MAX_SPACES:],
        tables=(tables.spaces_table(structure),),
    )


def _rounds_block(key: str, universe: UniverseFile) -> Block:
    svg = figures.objective_curve(
        "spread", (universe.spreads,), f"{key}-spread", step="round", quantity="spread"
    )
    caption = (
        "Distance of the models from their mean, over their own norm: aligned to the reference,"
        " and after every round."
    )
    facts = {
        "models": ", ".join(universe.models),
        "moved in each round": list(universe.moved),
        "cycle error": universe.cycle_error,
        **universe.settings,
    }
    return Block(
        "The rounds",
        figures=(Figure.of(svg, caption),),
        facts=tuple((name, tables.setting_text(value)) for name, value in facts.items()),
    )


def _search_block(key: str, results: Results) -> Iterator[Block]:
    """Objective curves of the methods, or else of the solution."""
    methods, solution = results.curve.methods if results.curve else (), results.solution
    runs = {method.label: method.objectives for method in methods if method.objectives}
    if solution and not runs:
        runs = {"alignment": (solution.objective,)}
    if not runs and not solution:
        return
    drawings = tuple(
        Figure.of(
            figures.objective_curve(label, objectives, f"{key}-objective{number}"),
            f"{label}: objective per sweep.",
        )
        for number, (label, objectives) in enumerate(runs.items())
        if all(objectives)
    )
    if not solution:
        yield Block("The search", figures=drawings)
        return
    shown_elsewhere = any(method.settings for method in methods)
    settings = {} if shown_elsewhere else solution.settings
    yield Block(
        "The search",
        text=phrases.search_summary(solution),
        figures=drawings,
        tables=(tables.objective_by_space(solution),),
        facts=tuple((name, tables.setting_text(value)) for name, value in settings.items()),
    )
