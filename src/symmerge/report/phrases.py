"""Text of the page: formatted numbers, names and summaries of results."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf, isfinite, isinf, log10

from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.results import TaskRecord
from symmerge.models.alignment_results import SolutionFile, UniverseFile
from symmerge.models.structure import SpaceStructure
from symmerge.report.names import joined

TASKS = {
    "mlm": "Masked language modelling",
    "clm": "Causal language modelling",
    "seq2seq": "Continuing a text (encoder-decoder)",
    "image": "Image classification",
    "text": "Text classification",
}
NO_BARRIER = 0.005  # loss; smaller barriers count as zero


def number_text(value: float) -> str:
    """Format with four digits; very large and small numbers in scientific notation."""
    if not isfinite(value):
        return "infinite" if isinf(value) else "overflow"
    return f"{value:#.4g}".rstrip(".") if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def short_number(value: float) -> str:
    """Format with three digits, for figures that are read at a glance."""
    if not isfinite(value) or not (value == 0 or 1e-3 <= abs(value) < 1e4):
        return number_text(value)
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1e3 else f"{value:.0f}"


def estimate_text(value: Estimate) -> str:
    """Format an estimate with its standard error, if it has one."""
    if value.error is None or not 1e-6 < value.error < inf:
        return number_text(value.mean)
    decimals = max(0, 1 - floor(log10(value.error)))  # two digits of the error
    return f"{value.mean:.{decimals}f} ± {value.error:.{decimals}f}"


def metric_text(metric: str) -> str:
    """The name of a metric for people."""
    return metric.replace("_", " ")


def position_text(t: float) -> str:
    """Format a position on the line."""
    return f"{t:.3f}".rstrip("0").ljust(4, "0")


def data_name(data: str) -> str:
    """Data for people: `self` is no name they know."""
    return "self-generated inputs" if data == "self" else data


def task_title(task: TaskRecord) -> str:
    """The task and its data."""
    return f"{TASKS.get(task.name, task.name)} on {data_name(task.data)}"


def explain_barriers(names: Sequence[str]) -> str:
    """Explain the barriers of several models."""
    return (
        "The barrier of a pair is the largest loss on the straight line between the two, less the"
        f" mean of their own losses. The barrier of all {len(names)} merged is the loss of their"
        f" mean, less the mean of their own losses. Models in this order: {', '.join(names)}."
    )


UNIVERSE = (
    "All models are first aligned to one of them, then each, round after round, to the mean of all"
    " others, as long as that brings them closer; methods that learn continue from there. The"
    " spread is their distance from their mean, over their own norm. Each model has one element,"
    " so going round any three of them changes nothing but rounding: the cycle error."
)


def element_text(space: SpaceStructure) -> str:
    """The kind of group element of a space, in words."""
    blocks = f", in {space.blocks} blocks" if space.blocks > 1 else ""
    return f"{space.kind} of {space.size}{blocks}"


def solution_summary(solution: SolutionFile, names: Sequence[str]) -> str:
    """Summary of an alignment, if no loss was measured."""
    return (
        f"Alignment brought the weights of {joined(names)} from"
        f" {number_text(solution.distance_before)} to {number_text(solution.distance_after)} apart;"
        " the functions stayed the same."
    )


def universe_summary(universe: UniverseFile) -> str:
    """Summary of aligning many models: how close they came."""
    first, last = number_text(universe.spreads[0]), number_text(universe.spreads[-1])
    failed = ", ".join(universe.left_out.values())
    return (
        f"All models in the coordinates of one: the spread around their mean is {first} aligned to"
        f" it, {last} after {len(universe.spreads) - 1} rounds"
        f"{f'; left out: {failed}' if failed else ''}."
    )


def search_summary(solution: SolutionFile, names: Sequence[str]) -> str:
    """How much closer the weights came, and whether the search converged."""
    before, after = number_text(solution.distance_before), number_text(solution.distance_after)
    end = "converged" if solution.converged else "was still improving when it was stopped"
    return (
        f"The weights of {joined(names)} were {before} apart before alignment and {after} after"
        f" (relative to their size). The search took {len(solution.objective)} sweeps in"
        f" {solution.seconds:.3g} s and {end}."
    )
