"""What a solver returns: the alignment of a pair, and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any

from symmerge.matching.evidence import Weighting
from symmerge.models.alignment import Alignment
from symmerge.observation.correlations import Correlations


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One weighting from one start, and how its sweeps ended. Lower scores are better."""

    weighting: Weighting
    start: int
    score: float
    objective: tuple[float, ...]
    changes: tuple[int, ...]
    converged: bool
    by_space: Mapping[str, float]
    distance: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Trial:
        return cls(
            **{
                **record,
                "weighting": Weighting(**record["weighting"]),
                "objective": tuple(record["objective"]),
                "changes": tuple(record["changes"]),
            }
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Solution:
    """An alignment of B to A, and how it was found.

    The objective never increases from sweep to sweep, unless a published recipe pairs heads by
    another metric than the one it minimises.
    """

    alignment: Alignment
    objective: tuple[float, ...] = ()  # one value per sweep, or per learning step
    by_space: Mapping[str, float] = field(default_factory=dict)  # last objective, by space
    changes: tuple[int, ...] = ()  # spaces that each sweep changed
    converged: bool = False
    interrupted: bool = False  # Ctrl-C: this is the best so far
    seconds: float = 0.0
    distance: float = nan  # between A and the aligned B; nan where not measured
    options: Mapping[str, Any] = field(default_factory=dict)  # of the solver, as JSON
    weighting: Weighting | None = None  # the best one
    scored_on: str = ""  # what the best was chosen by
    trials: tuple[Trial, ...] = ()
    learned: Mapping[str, Any] | None = None  # counts of a learned method
    soft: Mapping[str, Any] | None = None  # losses of a soft method
    correlations: Correlations | None = None  # of features, where statistics were gathered
    relaxed: Alignment | None = None  # what a soft method found before hardening: no symmetry

    @property
    def settings(self) -> dict[str, Any]:
        """The options and what was chosen, for solution.json."""
        chosen = asdict(self.weighting) if self.weighting else {}
        counts = {"learned": self.learned, "soft": self.soft}
        return {
            **self.options,
            "chosen": chosen,
            "scored_on": self.scored_on,
            **{name: count for name, count in counts.items() if count is not None},
        }

    def to_json(self) -> dict[str, Any]:
        """The part of solution.json that the solver knows."""
        return {
            "objective": self.objective,
            "by_space": self.by_space,
            "changes": self.changes,
            "converged": self.converged,
            "seconds": self.seconds,
            "settings": self.settings,
            "trials": tuple(trial.to_json() for trial in self.trials),
            "interrupted": self.interrupted,
            "distance": self.distance,
        }

    def __repr__(self) -> str:
        ended = "interrupted" if self.interrupted else "converged" if self.converged else "stopped"
        return (
            f"Solution({len(self.alignment.elements)} spaces, {ended} after"
            f" {len(self.objective)} sweeps and {self.seconds:.1f} s, distance {self.distance:.3f})"
        )
