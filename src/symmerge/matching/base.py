"""What solvers return: a `Solution` for a pair of models, a `Universe` for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import nan
from typing import Any

from torch import Tensor

from symmerge.checkpoints.json_results import Record
from symmerge.matching.evidence import Weighting
from symmerge.models.alignment import Alignment
from symmerge.observation.correlations import Correlations


@dataclass(frozen=True, kw_only=True)
class Trial(Record):
    """One weighting from one start, and how its sweeps ended. Lower scores are better."""

    weighting: Weighting
    start: int
    score: float
    objective: tuple[float, ...]
    changes: tuple[int, ...]
    converged: bool
    by_space: Mapping[str, float]
    distance: float


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
    options: Mapping[str, object] = field(default_factory=dict)  # of the solver, as JSON
    weighting: Weighting | None = None  # the best one
    scored_on: str = ""  # what the best was chosen by
    trials: tuple[Trial, ...] = ()
    learned: Mapping[str, object] | None = None  # counts of a learned method
    soft: Mapping[str, Any] | None = None  # losses of a soft method
    correlations: Correlations | None = None  # of features, where statistics were gathered
    relaxed: Alignment | None = None  # what a soft method found before hardening: no symmetry

    @property
    def settings(self) -> dict[str, object]:
        """The options and what was chosen, for solution.json."""
        chosen = self.weighting.to_json() if self.weighting else {}
        counts = {"learned": self.learned, "soft": self.soft}
        return {
            **self.options,
            "chosen": chosen,
            "scored_on": self.scored_on,
            **{name: count for name, count in counts.items() if count is not None},
        }

    def __repr__(self) -> str:
        ended = "interrupted" if self.interrupted else "converged" if self.converged else "stopped"
        return (
            f"Solution({len(self.alignment.elements)} spaces, {ended} after"
            f" {len(self.objective)} sweeps and {self.seconds:.1f} s, distance {self.distance:.3f})"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Universe:
    """One alignment per model, to the coordinates of the reference (whose own is the identity)."""

    alignments: tuple[Alignment, ...]  # the identity for models that were left out
    reference: int
    spreads: tuple[float, ...]  # distance of the members from their mean, after each round
    moved: tuple[int, ...] = ()  # how many members each round moved
    left_out: Mapping[int, str] = field(default_factory=dict)  # which models failed, and why
    interrupted: bool = False  # Ctrl-C: this is the best so far
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def members(self) -> list[int]:
        """Indices of the models in it."""
        return [number for number in range(len(self.alignments)) if number not in self.left_out]

    def between(self, a: int, b: int) -> Alignment:
        """From the coordinates of one member to those of another."""
        return self.alignments[b].inverse().compose(self.alignments[a])

    def __repr__(self) -> str:
        return (
            f"Universe({len(self.members)} of {len(self.alignments)} models, reference"
            f" {self.reference}, {len(self.moved)} rounds, spread {self.spreads[-1]:.3f})"
        )


def cycle_error(universe: Universe) -> float:
    """Largest distance from the identity around a cycle of three members: rounding only."""
    members = universe.members
    cycles = list(combinations(members, 3)) or [(a, b, a) for a, b in combinations(members, 2)]
    errors = (
        composition_error([universe.between(a, b), universe.between(b, c), universe.between(c, a)])
        for a, b, c in cycles
    )
    return max(errors, default=0.0)


def composition_error(alignments: Sequence[Alignment]) -> float:
    """Largest difference between a chain of alignments and the identity; 1 for a moved index."""
    total = alignments[0]
    for step in alignments[1:]:
        total = step.compose(total)
    identity = Alignment.identity(total.spec)
    errors = (
        _difference(part, total[space][part], value)
        for space, element in identity.elements.items()
        for part, value in element.items()
    )
    return max(errors, default=0.0)


def _difference(part: str, value: Tensor, identity: Tensor) -> float:
    if part == "index":
        return float((value != identity).any())
    return (value - identity).abs().max().item() if value.numel() else 0.0
