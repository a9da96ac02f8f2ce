"""Add a difference, moved to OTHER's own coordinates, to OTHER."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, Weights, working
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model
from symmerge.models.widening import narrowed
from symmerge.transporting.differences import difference, moved, own_change
from symmerge.transporting.frames import Passage, framed


def carried(
    passage: Passage,
    tuned: Model,
    scale: Mapping[str, float] | float = 1.0,
    *,
    change: Weights | None = None,
    untie: bool = False,
    narrow: Model | None = None,
) -> Model:
    """OTHER with what TUNED learned, a stock model in OTHER's own coordinates. Lazy.

    `change` is the difference in BASE's frame, if it is known already. A tied head of OTHER stays
    tied, which is an approximation, unless `untie`. `narrow`: what the passage's OTHER was widened
    from; it gets the closest change that it has room for, an approximation.
    """
    change = moved(passage, difference(passage, tuned) if change is None else change, scale)
    what = f"{tuned.where} - {passage.base.where}, carried to {passage.other.where}"
    if narrow is not None:
        there = standing(narrow)
        change = narrowed(change, there.end, passage.end)
        what = f"{what}, cut to its widths (an approximation)"
        passage = there
    return arrived(passage, change, HistoryStep("transport", what), untie=untie)


def standing(model: Model) -> Passage:
    """The way from a model to itself."""
    return Passage(model, model, Alignment.identity(framed(model).spec), ())


def arrived(passage: Passage, change: Weights, step: HistoryStep, *, untie: bool = False) -> Model:
    """OTHER plus a change in its frame."""
    loose, own = own_change(passage, change)
    other = passage.other
    if untie or loose.spec.ties.keys() == other.spec.ties.keys():
        return _plus(loose, own, step)
    joined: dict[str, tuple[str, Tensor]] = {
        target: (alias, _gain_of(passage, alias))
        for alias, target in other.spec.ties.items()
        if alias not in loose.spec.ties
    }

    step = replace(step, what=f"{step.what}; its tied head is a compromise (--untie is exact)")

    def compromise(target: str) -> Tensor:
        alias, gain = joined[target]
        return tied_change(own[target], own[alias], gain)

    tied = DerivedWeights(own, {target: partial(compromise, target) for target in joined})
    return _plus(other, tied, step)


def _gain_of(passage: Passage, head: str) -> Tensor:
    """The gain of the norm that a head reads."""
    spec = passage.end.spec
    readers = {spec.weight_of(one): norm.gain for norm in spec.norms for one in norm.readers}
    return passage.other.weights[readers[head]]


def tied_change(embedding: Tensor, head: Tensor, gain: Tensor) -> Tensor:
    """The least-squares compromise of what an embedding and a head that is tied to it should be.

    A head reads its coordinates times the gain, so errors there count by its square.
    """
    weight = gain.square() / gain.square().mean().clamp_min(1e-30)
    return (embedding + weight * head) / (1 + weight)


def _plus(model: Model, change: Weights, step: HistoryStep) -> Model:
    def compute(name: str) -> Tensor:
        tensor = model.weights[name]
        return (tensor + change[name]).to(working(model.weights.dtype(name)))

    computed = {name: partial(compute, name) for name in model.weights}
    return model.derive(DerivedWeights(model.weights, computed), step=step)
