"""A trial of a search, with the alignment it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from symmerge.matching.base import Trial
from symmerge.matching.sweeps import Sweeps
from symmerge.models.alignment import Alignment


@dataclass(frozen=True)
class Candidate:
    """A trial, and the alignment it found."""

    trial: Trial
    alignment: Alignment


def candidate_of(
    sweeps: Sweeps, start: int, *, score: float, converged: bool, by_space: Mapping[str, float]
) -> Candidate:
    """What sweeps have found so far."""
    trial = Trial(
        weighting=sweeps.evidence.weighting,
        start=start,
        score=score,
        objective=tuple(sweeps.objective),
        changes=tuple(sweeps.changes),
        converged=converged,
        by_space=by_space,
        distance=sweeps.distance,
    )
    return Candidate(trial, sweeps.alignment)
