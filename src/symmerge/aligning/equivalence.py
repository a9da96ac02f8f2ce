"""Are two checkpoints the same function up to symmetry? Decided by alignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from symmerge.aligning.aligned import solve_pair
from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.checkpoints.json_results import Record
from symmerge.matching.recipes import RECIPES
from symmerge.models.canonical.form import canonicalize
from symmerge.models.distances import distances_by_space
from symmerge.models.model import Progress
from symmerge.verification.verdict import TOLERANCE, Verdict, verify


@dataclass(frozen=True)
class Certificate(Record):
    """Whether two checkpoints are one function up to symmetry, and the evidence.

    Distances of the weights before and after alignment, in all and by space; the logits' verdict.
    """

    same: Annotated[bool, "Whether weights and logits agree within the tolerance."]
    before: Annotated[float, "Distance of the weights over their norm, as stored."]
    after: Annotated[float, "The same after alignment."]
    tolerance: Annotated[float, "Largest distance that counts as rounding."]
    by_space: Annotated[dict[str, dict[str, float]], "Space -> distance `before` and `after`."]
    verdict: Annotated[Verdict, "The comparison of the logits."]


def same(a: ModelLike, b: ModelLike, *, progress: Progress | None = None) -> Certificate:
    """Decide whether two models are one function up to symmetry.

    Generically, two models compute the same function if and only if a symmetry relates them.
    """
    a, b = open_model(a), open_model(b)
    # No self-generated text: if the models are equivalent, any weighting finds the symmetry.
    alignment = solve_pair(a, b, RECIPES["weights-only"], progress=progress)
    tolerance = 10 * TOLERANCE[max((a.dtype, b.dtype), key=lambda kind: TOLERANCE[kind])]
    verdict = verify(a, b)
    reference = alignment.reference
    before = distances_by_space(reference, canonicalize(b))
    after = distances_by_space(reference, alignment.aligned)
    return Certificate(
        same=alignment.after <= tolerance and verdict.same,
        before=alignment.before,
        after=alignment.after,
        tolerance=tolerance,
        by_space={space: {"before": before[space], "after": after[space]} for space in after},
        verdict=verdict,
    )
