"""The section of one folder on the page: the verdict, a picture, a table; the rest in folds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from symmerge.errors import SymmergeError
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.report import (
    experiment,
    figures,
    kinship,
    phrases,
    simplex_tables,
    tables,
    verdict_figures,
)
from symmerge.report.blocks import Block, Figure
from symmerge.report.evidence import evidence_blocks
from symmerge.report.names import joined
from symmerge.report.results import CurveSummary, Results
from symmerge.report.simplices import barrier_block, pair_matrices, simplex_blocks
from symmerge.report.verdict import Headline, headline

DEFINITIONS = (
    (
        "Over the mean",
        "The largest L(t) − (L(0) + L(1)) / 2: against the mean loss of the two parents. Used by"
        " Verma and Elbayad. The sentences on this page use this one.",
    ),
    (
        "Over the line",
        "The largest L(t) − ((1 − t) L(0) + t L(1)): against the straight line between the"
        " parents' losses. Used by Theus et al.",
    ),
)
BARRIERS = (
    "Merging at t means (1 − t) × A + t × B, weight by weight; L(t) is the loss of that merge. Two"
    " definitions are in use, equal where both parents have the same loss. Where there are several"
    " pairs, numbers are means ± standard errors over the pairs."
)


@dataclass(frozen=True)
class MeasuredPath:
    """The measured line between two models, or over several pairs."""

    curve: CurveSummary
    loss: Figure
    table: tables.PageTable


@dataclass(frozen=True, kw_only=True)
class Section:
    """One folder on the page; `path` is set where the line between two models was measured."""

    key: str
    name: str
    title: str
    subtitle: str
    verdict: Headline
    barriers: tuple[tables.BarrierRow, ...]
    path: MeasuredPath | None
    blocks: tuple[Block, ...]

    @property
    def shown(self) -> tuple[Block, ...]:
        """The blocks that stand open."""
        return tuple(block for block in self.blocks if block.shown)

    @property
    def folds(self) -> tuple[Block, ...]:
        """The blocks that are folded."""
        return tuple(block for block in self.blocks if not block.shown)


def build_section(key: str, results: Results, *, named: bool) -> Section:
    """The section of a folder; `key` makes ids unique, `named` puts the folder in the title."""
    name = results.folder.resolve().name
    try:
        title, subtitle = _titles(results)
        section = Section(
            key=key,
            name=name,
            title=f"{name}: {title}" if named else title,
            subtitle=subtitle,
            verdict=headline(results),
            barriers=_barriers(results),
            path=_measured_path(key, results.curve) if results.curve else None,
            blocks=tuple(_blocks(key, results)),
        )
    except (KeyError, IndexError, ValueError) as error:  # lengths or metrics that do not agree
        raise SymmergeError(
            f"the results in {results.folder} do not fit together ({error!r}): write them again"
        ) from error
    return section if section.path else _with_a_picture(section)


def _with_a_picture(section: Section) -> Section:
    """Without a path, show the first block with a picture, or the first where none has one."""
    if any(block.shown for block in section.blocks):
        return section
    first = next((block for block in section.blocks if block.has_picture), section.blocks[0])
    blocks = (replace(block, shown=block is first) for block in section.blocks)
    return replace(section, blocks=tuple(blocks))


def _titles(results: Results) -> tuple[str, str]:
    """The title of a folder, and which models it is about."""
    if curve := results.curve:
        pairs = f"{len(curve.pairs)} pairs of models" if len(curve.pairs) > 1 else ""
        return phrases.task_title(curve.task), pairs or f"A: {curve.names[0]} · B: {curve.names[1]}"
    if simplex := results.simplex:
        title = f"{phrases.task_title(simplex.task)}, {len(simplex.models)} models"
        return title, ", ".join(simplex_tables.names_of(simplex))
    if record := results.experiment:
        return f"{record.name}: {record.paper}", ""
    if verdict := results.verdict:
        names = (row.name for row in verdict.rows if row.kind == "parent")
        return phrases.task_title(verdict.task), ", ".join(names)
    if results.kinship:
        return "Are two models related?", joined(results.kinship.names)
    if results.solution:
        return "Alignment of two models", joined(results.names)
    assert results.universe, "a folder has a main file"
    return f"Alignment of {len(results.universe.models)} models", ""


def _barriers(results: Results) -> tuple[tables.BarrierRow, ...]:
    if curve := results.curve:
        return tuple(
            tables.BarrierRow(method.label, method.barrier_mean, method.barrier_linear)
            for method in curve.methods
        )
    return simplex_tables.barrier_rows(results.simplex) if results.simplex else ()


def _measured_path(key: str, curve: CurveSummary) -> MeasuredPath:
    best, (a, b) = curve.best, curve.names
    marked = f" Blue: the best, {best.label}." if best else ""
    shade = " Shaded: standard error over the pairs." if len(curve.pairs) > 1 else ""
    caption = (
        f"Loss on the straight path from A ({a}) to B ({b}), lower is better.{marked} Numbers"
        f" beside the labels are those of the midpoint.{shade}"
    )
    loss = Figure.of_chart(
        f"{key}-loss",
        lambda name, frame: figures.metric_curve(curve, "loss", name, frame),
        caption,
    )
    return MeasuredPath(curve, loss, tables.curve_table(curve))


def _blocks(key: str, results: Results) -> Iterator[Block]:
    if results.verdict and not results.curve:
        yield _verdict_block(key, results.verdict)
    if results.curve:
        yield from _curve_blocks(key, results.curve)
    if results.simplex:
        yield from simplex_blocks(f"{key}-many", results.simplex)
    if results.experiment:
        yield from experiment.experiment_blocks(f"{key}-experiment", results.experiment)
    if results.kinship:
        yield from kinship.kinship_blocks(key, results.kinship)
    yield from evidence_blocks(key, results)
    if results.curve:
        yield _method_block(results.curve)


def _verdict_block(key: str, verdict: MergeVerdict) -> Block:
    caption = f"Loss on {phrases.data_name(verdict.task.data)}, lower is better."
    has_line = max(len(verdict.aligned_line or ()), len(verdict.plain_line or ())) > 1
    draw = verdict_figures.verdict_lines if has_line else verdict_figures.verdict_dots
    drawing = Figure.of_chart(
        f"{key}-verdict", lambda name, frame: draw(verdict, name, frame), caption
    )
    return Block(
        "The merge beside its parents",
        figures=(drawing,) if has_line or len(verdict.rows) > 1 else (),
        tables=(tables.verdict_table(verdict),),
        shown=True,
    )


def _curve_blocks(key: str, curve: CurveSummary) -> Iterator[Block]:
    if others := curve.metrics[1:]:
        drawings = tuple(
            Figure.of_chart(
                f"{key}-metric{number}",
                lambda name, frame, metric=metric: figures.metric_curve(curve, metric, name, frame),
                f"{phrases.metric_text(metric)} on the same path.",
            )
            for number, metric in enumerate(others)
        )
        names = joined([phrases.metric_text(metric) for metric in others])
        yield Block(f"Other metrics: {names}", figures=drawings)
    if matrices := pair_matrices(curve):
        yield barrier_block(*matrices, key)
    both = (tables.both_barriers(curve),)
    yield Block("What a barrier is", BARRIERS, tables=both, definitions=DEFINITIONS)
    yield Block("Every point as numbers", tables=(tables.curve_points(curve),))


def _method_block(curve: CurveSummary) -> Block:
    settings = tables.settings_table({method.label: method.settings for method in curve.methods})
    return Block(
        "How it was measured",
        tables=(tables.pair_models(curve), *((settings,) if settings else ())),
        facts=tuple(tables.curve_facts(curve)),
    )
