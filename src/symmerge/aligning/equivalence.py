"""Are two checkpoints the same function up to symmetry? Decided by alignment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.aligning.aligned import solve_pair
from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.checkpoints.json_results import Record
from symmerge.checkpoints.weights import working
from symmerge.matching.recipes import RECIPES
from symmerge.models.canonical.form import canonicalize
from symmerge.models.canonical.means import gather_rows
from symmerge.models.distances import distances_by_space
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.verification.rounding import relative_rounding
from symmerge.verification.verdict import Verdict, verify

# How far rounding may move a tensor, in standard deviations of its rounding errors. Aligned again
# after a random symmetry, tensors of all families lie at most 1.4 of them apart in bfloat16 and
# float16. In float32 the errors of products count more: trained models lie up to 0.9 of them apart.
ROUNDED, COMPUTED = 2.5, 8.0
# One row or column of a tensor, or one number of a vector, may lie this much further apart: of the
# worst of them 2.6 and 3.7 standard deviations were seen. One wrong unit is lost in a whole tensor.
PART, NUMBER = 2.0, 3.5


@dataclass(frozen=True)
class Certificate(Record):
    """Whether two checkpoints are one function up to symmetry, and the evidence.

    Distances of the weights before and after alignment, in all and by space; the logits' verdict.
    """

    same: Annotated[bool, "Whether rounding explains what is left, in weights and logits."]
    before: Annotated[float, "Distance of the weights over their norm, as stored."]
    after: Annotated[float, "The same after alignment."]
    units: Annotated[float, "Worst tensor, in units of what rounding explains: at most 1."]
    tensor: Annotated[str, "That tensor."]
    by_space: Annotated[dict[str, dict[str, float]], "Space -> distance `before` and `after`."]
    verdict: Annotated[Verdict, "The comparison of the logits."]


def same(a: ModelLike, b: ModelLike, *, progress: Progress | None = None) -> Certificate:
    """Decide whether two models are one function up to symmetry.

    Generically, two models compute the same function if and only if a symmetry relates them.
    """
    a, b = open_model(a), open_model(b)
    verdict = verify(a, b)
    certificate = _certificate(a, b, verdict, progress)
    if certificate.same or not verdict.same:
        return certificate
    # Not at first: what is left of rows that are nearly equal is rounding.
    gathered = gather_rows(a), gather_rows(b)
    again = certificate if gathered == (a, b) else _certificate(*gathered, verdict, progress)
    return again if again.same else certificate


def _certificate(a: Model, b: Model, verdict: Verdict, progress: Progress | None) -> Certificate:
    # No self-generated text: if the models are equivalent, any weighting finds the symmetry.
    recipe = RECIPES["weights-only"]
    recipe = replace(recipe, steps=(*recipe.steps, "sums"))
    alignment = solve_pair(a, b, recipe, progress=progress)
    worst = max(_tensor_distances(*alignment.models))
    reference = alignment.reference
    before = distances_by_space(reference, canonicalize(b, recipe.steps))
    after = distances_by_space(reference, alignment.aligned)
    return Certificate(
        same=worst.units <= 1 and verdict.same,
        before=alignment.before,
        after=alignment.after,
        units=worst.units,
        tensor=worst.name,
        by_space={space: {"before": before[space], "after": after[space]} for space in after},
        verdict=verdict,
    )


class _TensorDistance(NamedTuple):
    """How far apart a tensor of two aligned models is, in units of what rounding explains."""

    units: float
    name: str


def _tensor_distances(first: Model, second: Model) -> Iterator[_TensorDistance]:
    for name in first.weights:
        if 0 in first.weights.shape(name):
            continue
        x, y = (_matrix(model.weights[name].double()) for model in (first, second))
        apart = max(
            _distance(x.reshape(1, -1), y.reshape(1, -1)),
            _distance(x, y) / (PART if x.shape[1] > 1 else NUMBER),
            _distance(x.mT, y.mT) / PART,
        )
        yield _TensorDistance(apart / _rounding(first, second, name), name)


def _matrix(tensor: Tensor) -> Float[Tensor, "rows columns"]:
    """A tensor as a matrix, a vector as a column."""
    tensor = torch.atleast_1d(tensor.squeeze())
    return tensor.reshape(len(tensor), -1)


def _distance(x: Float[Tensor, "rows columns"], y: Float[Tensor, "rows columns"]) -> float:
    """The largest relative distance of two rows, where none counts as shorter than is usual."""
    norms = torch.maximum(x.norm(dim=1), y.norm(dim=1))
    usual = norms.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return ((x - y).norm(dim=1) / norms.clamp_min(usual)).max().nan_to_num(inf).item()


def _rounding(first: Model, second: Model, name: str) -> float:
    """The largest relative distance that rounding explains."""
    stored = max(
        (model.weights.dtype(name) for model in (first, second)),
        key=lambda dtype: torch.finfo(dtype).eps,
    )
    limit = COMPUTED if stored == working(stored) else ROUNDED
    return limit * relative_rounding(stored) / 12**0.5
