"""Are two checkpoints the same function up to symmetry? Decided by alignment."""

from __future__ import annotations

from dataclasses import dataclass

from symmerge.aligning.pair import align
from symmerge.checkpoints.json_results import Record
from symmerge.matching.recipes import RECIPES
from symmerge.models.canonical.form import canonicalize
from symmerge.models.distances import distances_by_space
from symmerge.models.model import Model, Progress
from symmerge.verification.verdict import TOLERANCE, Verdict, verify


@dataclass(frozen=True)
class Certificate(Record):
    """Whether two checkpoints are one function up to symmetry: how far their weights are apart, before and after, and the logits."""

    same: bool
    before: float
    after: float
    tolerance: float
    by_space: dict[str, dict[str, float]]
    verdict: Verdict


def same(a: Model, b: Model, *, progress: Progress | None = None) -> Certificate:
    """Decide equivalence by alignment: generically, two models compute the same function exactly when a symmetry relates them."""
    # Own text is no help here: if the models are equivalent, every weighting finds the same symmetry.
    found = align(a, b, RECIPES["weights-only"], progress=progress)
    tolerance = 10 * TOLERANCE[max((a.dtype, b.dtype), key=lambda kind: TOLERANCE[kind])]
    verdict = verify(a, b)
    before, after = (
        distances_by_space(found.reference, canonicalize(b)),
        distances_by_space(found.reference, found.aligned),
    )
    by_space = {space: {"before": before[space], "after": after[space]} for space in after}
    return Certificate(
        found.after <= tolerance and verdict.same,
        found.before,
        found.after,
        tolerance,
        by_space,
        verdict,
    )
