"""Interpolate two models in one basin, with another t for some parts. Nothing is aligned here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights
from symmerge.merging.circuits import cut, inflate
from symmerge.models.interpolation import between, merge_step, piece_time
from symmerge.models.label_sets import with_all_labels
from symmerge.models.model import Model
from symmerge.models.tables import check_same_table

Attention = Literal["factors", "svd", "circuits"]
NOTES = {
    "factors": "",
    "svd": "; attention by circuits, cut to rank",
    "circuits": "; attention by circuits, in heads of twice the size",
}


def average(
    a: Model,
    b: Model,
    t: float = 0.5,
    *,
    at: Mapping[str, float] | None = None,
    attention: Attention = "factors",
    evidence: Mapping[str, object] | None = None,
) -> Model:
    """The model at `t` on the line from `a` (t = 0) to `b` (t = 1). Lazy.

    `at` gives parts another t: a space (`ff`, `vo.3`), a layer (`layer.3`), or `residual` for
    tensors with no other hidden space; the most specific wins. `attention` interpolates each
    head's weights (`factors`), its circuits truncated to rank (`svd`), or its full circuits
    (`circuits`: heads of twice the size, not stock). `evidence` goes into the model card.
    """
    check_same_table([a, b])
    a, b = with_all_labels([a, b])
    times = at or {}
    time = piece_time(a.spec, t, times)
    what = f"{1 - t:g} x {a.where}, {t:g} x {b.where}"
    what += "".join(f"; {name} at {value:g}" for name, value in times.items()) + NOTES[attention]
    step = merge_step([a, b], [1 - t, t], what, evidence=evidence)
    if attention == "circuits":
        return inflate(a, b, time, step)
    at_time: Callable[[str], Tensor] = partial(between, a, b, time)
    tensors = {name: partial(at_time, name) for name in a.weights}
    if attention == "svd":
        tensors |= cut(a, b, time, at_time)
    return a.derive(DerivedWeights(a.weights, tensors), step=step)
