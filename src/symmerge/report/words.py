"""Numbers and results in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, inf, isfinite, isinf, log10
from typing import Any

from symmerge.report.results import Curve, Estimate, Method, number

TASKS = {"mlm": "Masked language modelling", "clm": "Causal language modelling", "image": "Image classification", "text": "Text classification"}
PLAIN = "none"  # the method that averages as they are
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


def task_title(curve: Curve) -> str:
    """What was measured, and on what."""
    return f"{TASKS.get(curve.task['name'], curve.task['name'])} on {curve.task['data']}"


def best_aligned(curve: Curve) -> Method | None:
    """Of the methods that align, the one with the lowest barrier."""
    aligned = [method for method in curve.methods if method.name != PLAIN]
    return min(aligned, key=lambda method: _rank(method.barrier_mean.mean), default=None)


def summary(curve: Curve) -> str:
    """The result in one or two sentences."""
    plain = next((method for method in curve.methods if method.name == PLAIN), None)
    best = best_aligned(curve)
    over = f", on average over {len(curve.pairs)} pairs" if len(curve.pairs) > 1 else ""
    subject = "these models" if over else "these two models"
    if plain is None or best is None:
        only = plain or best
        assert only is not None, "a curve has a method"
        how = "as they are" if only is plain else f"after {only.label}"
        return f"Averaging {subject} {how} {_effect(only)}{over}."
    return f"Averaging {subject} as they are {_effect(plain)}{over}; after alignment ({best.label}) {_comparison(plain, best)}."


def element(space: Mapping[str, Any]) -> str:
    """What kind of element a space has."""
    blocks = space.get("blocks", 1)
    return f"{space['kind']} of {space['size']}" + (f", in {blocks} blocks" if blocks > 1 else "")


def closer(solution: Mapping[str, Any]) -> str:
    """What an alignment did, where no loss was measured."""
    before, after = (short(number(solution[f"distance_{when}"])) for when in ("before", "after"))
    return f"Alignment brought the weights of two models from {before} to {after} apart; the functions stayed the same."


def distances(solution: Mapping[str, Any]) -> str:
    """How much closer the alignment brought the weights, and whether the search came to an end."""
    before, after = (short(number(solution[f"distance_{when}"])) for when in ("before", "after"))
    sweeps, seconds = len(solution["objective"]), f"{number(solution['seconds']):.3g}"
    end = "and converged" if solution["converged"] else "and was still improving when it was stopped"
    return f"The weights of the two models were {before} apart before alignment and {after} after (relative to their size). The search took {sweeps} sweeps in {seconds} s {end}."


def _comparison(plain: Method, best: Method) -> str:
    before, after = plain.barrier_mean.mean, best.barrier_mean.mean
    if not isfinite(before) or not isfinite(after) or before <= NO_BARRIER or after <= NO_BARRIER:
        return f"it {_effect(best)}"
    ratio, than = (before / after, "less") if before >= after else (after / before, "more")
    times = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    return f"by {_rise(after)}: {times} times {than}"


def _effect(method: Method) -> str:
    barrier = method.barrier_mean.mean
    if not isfinite(barrier):
        return "makes the loss overflow"
    return f"raises the loss by {_rise(barrier)}" if barrier > NO_BARRIER else "does not raise the loss"


def _rise(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def _rank(value: float) -> float:
    return value if isfinite(value) else inf
