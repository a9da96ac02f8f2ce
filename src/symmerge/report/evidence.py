"""Blocks about an alignment: features, structure, search, rounds, amount of data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from symmerge.evaluation.experiment_results import AmountFile
from symmerge.models.alignment_results import UniverseFile
from symmerge.models.structure import StructureFile
from symmerge.observation.correlations import Correlations
from symmerge.report import figures, maps, phrases, tables
from symmerge.report.blocks import Block, Figure
from symmerge.report.results import Results

MAX_SPACES = 6  # figures of spaces shown at first; the others are folded


def evidence_blocks(key: str, results: Results) -> Iterator[Block]:
    """A block for each result of an alignment that exists."""
    if results.amount:
        yield _amount_block(key, results.amount)
    if results.structure:
        yield _structure_block(key, results.structure, results.names)
    if results.correlations:
        yield _correlations_block(key, results.correlations, results.names)
    yield from _search_block(key, results)
    if results.universe:
        yield _rounds_block(key, results.universe)


def _correlations_block(key: str, correlations: Correlations, names: Sequence[str]) -> Block:
    drawings = []
    # A single layer is a row of the table, not a plot of one point.
    if len({row.layer for row in correlations.layers}) > 1:
        caption = (
            f"How alike the features of {names[0]} and {names[1]} are, layer by layer:"
            " the closer to 1, the better."
        )
        svg = figures.layer_correlation(correlations, f"{key}-layers")
        drawings.append(Figure.of(svg, caption))
    if matrix := correlations.matrix:
        which = f", {matrix.features}" if matrix.features else ""
        caption = f"Correlations in {matrix.space}{which}; lines mark where a head ends."
        svg = maps.correlation_matrix(matrix, f"{key}-matrix", names=names)
        drawings.append(Figure.of(svg, caption))
    table = tables.correlations_table(correlations)
    return Block("Feature correlation", figures=tuple(drawings), tables=(table,))


def _amount_block(key: str, amount: AmountFile) -> Block:
    title, table = "Amount of data", tables.amount_table(amount)
    samples = {point.samples for method in amount.methods for point in method.points}
    if len(samples - {0}) < 2:
        return Block(title, tables=(table,))
    caption = (
        f"Barrier over the mean against the number of {amount.unit} used for matching;"
        " shaded: standard error over the pairs."
    )
    drawing = Figure.of_chart(
        f"{key}-amount", lambda name, frame: figures.amount_curve(amount, name, frame), caption
    )
    return Block(title, figures=(drawing,), tables=(table,))


def _structure_block(key: str, structure: StructureFile, names: Sequence[str]) -> Block:
    drawings = tuple(
        Figure.of(
            maps.element_map(space, f"{key}-space{number}"),
            f"{space.space}: {phrases.element_text(space)}",
        )
        for number, space in enumerate(structure.spaces)
        if space.size * space.blocks > 1
    )
    return Block(
        "Structure of the alignment",
        f"Where each coordinate of {names[1]} goes, to fit those of {names[0]}."
        " A diagonal means that nothing moves.",
        small=drawings[:MAX_SPACES],
        folded=drawings[MAX_SPACES:],
        tables=(tables.spaces_table(structure),),
    )


def _rounds_block(key: str, universe: UniverseFile) -> Block:
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
    runs = {"spread": (universe.spreads,)}
    return Block(
        "The rounds",
        figures=_objectives(f"{key}-spread", runs, "round", "spread", caption),
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
    drawings = _objectives(f"{key}-objective", runs, "sweep", "objective")
    if not solution:
        if drawings:
            yield Block("The search", beside=drawings)
        return
    shown_elsewhere = any(method.settings for method in methods)
    settings = {} if shown_elsewhere else solution.settings
    yield Block(
        "The search",
        text=phrases.search_summary(solution, results.names),
        beside=drawings,
        tables=(tables.objective_by_space(solution),),
        facts=tuple((name, tables.setting_text(value)) for name, value in settings.items()),
    )


def _objectives(
    key: str,
    runs: dict[str, tuple[tuple[float, ...], ...]],
    step: str,
    quantity: str,
    caption: str = "",
) -> tuple[Figure, ...]:
    """A figure for each that took two steps or more; one point is no curve."""
    return tuple(
        Figure.of(
            figures.objective_curve(
                label, of_pairs, f"{key}{number}", step=step, quantity=quantity
            ),
            caption or f"{label}: {quantity} per {step}.",
        )
        for number, (label, of_pairs) in enumerate(runs.items())
        if max(map(len, of_pairs)) > 1 and all(of_pairs)
    )
