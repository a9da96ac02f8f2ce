"""Numbers and results in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, inf, isfinite, isinf, log10
from pathlib import PurePath
from typing import Any

from symmerge.evaluation.estimates import Estimate
from symmerge.report.results import CurveSummary, number

TASKS = {
    "mlm": "Masked language modelling",
    "clm": "Causal language modelling",
    "image": "Image classification",
    "text": "Text classification",
}
PLAIN = "none"  # the method that averages as they are
NAME = 16  # letters of a name that fit beside a figure
NO_BARRIER = 0.005  # of loss: below this a path is as good as flat


def short(value: float) -> str:
    """Four figures; very large and very small numbers with a power of ten."""
    if not isfinite(value):
        return "infinite" if isinf(value) else "overflow"
    return f"{value:#.4g}".rstrip(".") if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def estimate(value: Estimate) -> str:
    """With its standard error where it has one."""
    if value.error is None or not 1e-6 < value.error < inf:
        return short(value.mean)
    decimals = max(0, 1 - floor(log10(value.error)))  # two figures of the error
    return f"{value.mean:.{decimals}f} ± {value.error:.{decimals}f}"


def position(t: float) -> str:
    """A place on the path."""
    return f"{t:.3f}".rstrip("0").ljust(4, "0")


def task_title(task: Mapping[str, Any]) -> str:
    """What was measured, and on what."""
    return f"{TASKS.get(task['name'], task['name'])} on {task['data']}"


def names(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """What models are called in figures: their folders, or their places where these are long or alike.

    >>> names([{"where": "zoo/seed-0"}, {"where": "zoo/seed-1"}]), names([{"where": "a/best"}, {"where": "b/best"}])
    (['seed-0', 'seed-1'], ['model 0', 'model 1'])
    """
    folders = [PurePath(model["where"]).name for model in models]
    fits = len(set(folders)) == len(folders) and all(0 < len(folder) <= NAME for folder in folders)
    return folders if fits else [f"model {number}" for number in range(len(models))]


def summary(curve: CurveSummary) -> str:
    """The result in one or two sentences."""
    over = f", on average over {len(curve.pairs)} pairs" if len(curve.pairs) > 1 else ""
    subject = "these models" if over else "these two models"
    return _verdict(
        subject,
        over,
        {method.name: (method.label, method.barrier_mean.mean) for method in curve.methods},
    )


def together(record: Mapping[str, Any]) -> str:
    """The same of several models that were merged at once."""
    barriers = {
        method["name"]: (method["label"], number(method["means"][-1]["barrier"]))
        for method in record["methods"]
    }
    return _verdict(f"all {len(record['models'])} models", "", barriers)


def _verdict(subject: str, over: str, barriers: Mapping[str, tuple[str, float]]) -> str:
    """Averaging as they are against the best of the others; `barriers` are by method, with its label."""
    plain = barriers.get(PLAIN)
    best = min(
        (found for name, found in barriers.items() if name != PLAIN),
        key=lambda found: _rank(found[1]),
        default=None,
    )
    if plain is None or best is None:
        only = plain or best
        assert only is not None, "something was measured"
        how = "as they are" if only is plain else f"after {only[0]}"
        return f"Averaging {subject} {how} {_effect(only[1])}{over}."
    return f"Averaging {subject} as they are {_effect(plain[1])}{over}; after alignment ({best[0]}) {_comparison(plain[1], best[1])}."


def merging(names: Sequence[str]) -> str:
    """What the barriers of several models are."""
    order = ", ".join(names)
    return (
        f"The barrier of a pair says how far the largest loss on the straight line between the two lies over the mean of their own; the barrier of all {len(names)} merged,"
        f" how far the loss of their mean does. Models in this order: {order}."
    )


UNIVERSE = (
    "All are first aligned to one of them, then each, round after round, to the mean of all others, as long as that brings them closer; what learns goes on from there. The spread is how far they lie"
    " from their mean, over their own size. Each has one element, so going round any three of them changes nothing but rounding: the cycle error."
)


def element(space: Mapping[str, Any]) -> str:
    """What kind of element a space has."""
    blocks = space.get("blocks", 1)
    return f"{space['kind']} of {space['size']}" + (f", in {blocks} blocks" if blocks > 1 else "")


def closer(solution: Mapping[str, Any]) -> str:
    """What an alignment did, where no loss was measured."""
    before, after = (short(number(solution[f"distance_{when}"])) for when in ("before", "after"))
    return f"Alignment brought the weights of two models from {before} to {after} apart; the functions stayed the same."


def gathered(record: Mapping[str, Any]) -> str:
    """How many models came how close together."""
    first, last = (short(number(record["spreads"][at])) for at in (0, -1))
    left = f"; left out: {', '.join(record['left_out'].values())}" if record["left_out"] else ""
    return f"All models in the coordinates of one: the spread around their mean is {first} aligned to it, {last} after {len(record['spreads']) - 1} rounds{left}."


def distances(solution: Mapping[str, Any]) -> str:
    """How much closer the alignment brought the weights, and whether the search came to an end."""
    before, after = (short(number(solution[f"distance_{when}"])) for when in ("before", "after"))
    sweeps, seconds = len(solution["objective"]), f"{number(solution['seconds']):.3g}"
    end = (
        "and converged" if solution["converged"] else "and was still improving when it was stopped"
    )
    return f"The weights of the two models were {before} apart before alignment and {after} after (relative to their size). The search took {sweeps} sweeps in {seconds} s {end}."


def _comparison(before: float, after: float) -> str:
    if not isfinite(before) or not isfinite(after) or before <= NO_BARRIER or after <= NO_BARRIER:
        return f"it {_effect(after)}"
    ratio, than = (before / after, "less") if before >= after else (after / before, "more")
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return f"by {_rise(after)}: {times} times {than}"


def _effect(barrier: float) -> str:
    if not isfinite(barrier):
        return "makes the loss overflow"
    return (
        f"raises the loss by {_rise(barrier)}"
        if barrier > NO_BARRIER
        else "does not raise the loss"
    )


def _rise(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def _rank(value: float) -> float:
    return value if isfinite(value) else inf
