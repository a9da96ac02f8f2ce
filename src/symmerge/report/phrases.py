"""Text of the page: formatted numbers, names and summaries of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, inf, isfinite, isinf, log10
from pathlib import PurePath

from symmerge.evaluation.estimates import Estimate
from symmerge.evaluation.results import SimplexFile, TaskRecord
from symmerge.models.alignment_results import SolutionFile, UniverseFile
from symmerge.models.structure import SpaceStructure
from symmerge.report.results import CurveSummary

TASKS = {
    "mlm": "Masked language modelling",
    "clm": "Causal language modelling",
    "image": "Image classification",
    "text": "Text classification",
}
PLAIN = "none"  # the method name of the plain average
MAX_NAME = 16  # characters of a name that fit beside a figure
NO_BARRIER = 0.005  # loss; smaller barriers count as zero


def number_text(value: float) -> str:
    """Format with four digits; very large and small numbers in scientific notation."""
    if not isfinite(value):
        return "infinite" if isinf(value) else "overflow"
    return f"{value:#.4g}".rstrip(".") if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def estimate_text(value: Estimate) -> str:
    """Format an estimate with its standard error, if it has one."""
    if value.error is None or not 1e-6 < value.error < inf:
        return number_text(value.mean)
    decimals = max(0, 1 - floor(log10(value.error)))  # two digits of the error
    return f"{value.mean:.{decimals}f} ± {value.error:.{decimals}f}"


def position_text(t: float) -> str:
    """Format a position on the line."""
    return f"{t:.3f}".rstrip("0").ljust(4, "0")


def task_title(task: TaskRecord) -> str:
    """The task and its data."""
    return f"{TASKS.get(task.name, task.name)} on {task.data}"


def model_names(places: Sequence[str]) -> list[str]:
    """Names for figures: folder names, or numbers if those are long or not unique.

    >>> model_names(["zoo/seed-0", "zoo/seed-1"]), model_names(["a/best", "b/best"])
    (['seed-0', 'seed-1'], ['model 0', 'model 1'])
    """
    folders = [PurePath(place).name for place in places]
    distinct = len(set(folders)) == len(folders)
    if distinct and all(0 < len(folder) <= MAX_NAME for folder in folders):
        return folders
    return [f"model {number}" for number in range(len(places))]


def curve_summary(curve: CurveSummary) -> str:
    """The result in one or two sentences."""
    over = f", on average over {len(curve.pairs)} pairs" if len(curve.pairs) > 1 else ""
    subject = "these models" if over else "these two models"
    barriers = {method.name: (method.label, method.barrier_mean.mean) for method in curve.methods}
    return _verdict(subject, over, barriers)


def simplex_summary(simplex: SimplexFile) -> str:
    """The result of merging several models at once."""
    barriers = {method.name: (method.label, method.means[-1].barrier) for method in simplex.methods}
    return _verdict(f"all {len(simplex.models)} models", "", barriers)


def _verdict(subject: str, over: str, barriers: Mapping[str, tuple[str, float]]) -> str:
    """Compare the plain average with the best method. `barriers`: name -> label, barrier."""
    plain = barriers.get(PLAIN)
    others = [barrier for name, barrier in barriers.items() if name != PLAIN]
    best = min(others, key=lambda barrier: _rank(barrier[1]), default=None)
    if plain is None or best is None:
        only = plain or best
        assert only is not None, "something was measured"
        how = "as they are" if only is plain else f"after {only[0]}"
        return f"Averaging {subject} {how} {_effect(only[1])}{over}."
    return (
        f"Averaging {subject} as they are {_effect(plain[1])}{over};"
        f" after alignment ({best[0]}) {_comparison(plain[1], best[1])}."
    )


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


def solution_summary(solution: SolutionFile) -> str:
    """Summary of an alignment, if no loss was measured."""
    return (
        "Alignment brought the weights of two models from"
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


def search_summary(solution: SolutionFile) -> str:
    """How much closer the weights came, and whether the search converged."""
    before, after = number_text(solution.distance_before), number_text(solution.distance_after)
    end = "converged" if solution.converged else "was still improving when it was stopped"
    return (
        f"The weights of the two models were {before} apart before alignment and {after} after"
        f" (relative to their size). The search took {len(solution.objective)} sweeps in"
        f" {solution.seconds:.3g} s and {end}."
    )


def _comparison(before: float, after: float) -> str:
    if not isfinite(before) or not isfinite(after) or before <= NO_BARRIER or after <= NO_BARRIER:
        return f"it {_effect(after)}"
    ratio, than = (before / after, "less") if before >= after else (after / before, "more")
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return f"by {_rise(after)}: {times} times {than}"


def _effect(barrier: float) -> str:
    if not isfinite(barrier):
        return "makes the loss overflow"
    if barrier <= NO_BARRIER:
        return "does not raise the loss"
    return f"raises the loss by {_rise(barrier)}"


def _rise(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def _rank(value: float) -> float:
    return value if isfinite(value) else inf
