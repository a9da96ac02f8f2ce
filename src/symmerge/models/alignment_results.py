"""solution.json and universe.json: how an alignment of two models, or of many, was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from symmerge.checkpoints.json_results import ResultFile


@dataclass(frozen=True, kw_only=True)
class SolutionFile(ResultFile):
    """How one model was aligned to another."""

    SCHEMA, WRITER = "symmerge.solution/1", "symmerge align"

    recipe: Annotated[str, "The recipe in a sentence."]
    distance_before: Annotated[float, "Distance of the weights over their norm, as stored."]
    distance_after: Annotated[float, "The same after alignment."]
    already_aligned: Annotated[bool, "Whether the pair was aligned to begin with."]
    objective: Annotated[tuple[float, ...], "The solver's objective after each sweep."]
    by_space: Annotated[Mapping[str, float], "The part of the last objective in each space."]
    changes: Annotated[tuple[int, ...], "Spaces that changed in each sweep."]
    converged: Annotated[bool, "Whether the search ended by itself."]
    seconds: Annotated[float, "Wall-clock time of the search."]
    settings: Annotated[Mapping[str, object], "Options of the solver, and what it chose."]
    trials: Annotated[
        tuple[Mapping[str, object], ...], "Every weighting and start, with its score."
    ]
    interrupted: Annotated[bool, "Whether Ctrl-C ended the search; this is the best until then."]
    distance: Annotated[float, "The solver's own distance; null where it measured none."]


@dataclass(frozen=True, kw_only=True)
class UniverseFile(ResultFile):
    """How a set of models was brought to common coordinates."""

    SCHEMA, WRITER = "symmerge.universe/1", "symmerge align A B C"

    recipe: Annotated[str, "The recipe in a sentence."]
    models: Annotated[tuple[str, ...], "Where the models came from, without those left out."]
    reference: Annotated[int, "The model whose coordinates all take, counted from 0."]
    spreads: Annotated[
        tuple[float, ...],
        "Distance of the models from their mean, over their norm: aligned to the reference,",
        "then after each round.",
    ]
    moved: Annotated[tuple[int, ...], "How many models each round moved."]
    left_out: Annotated[Mapping[int, str], "Models that failed, by number, and why."]
    interrupted: Annotated[bool, "Whether Ctrl-C ended the search; this is the best until then."]
    settings: Annotated[Mapping[str, object], "Options of the solver, and what it learned."]
    cycle_error: Annotated[
        float, "Distance from the identity after going round any three models: rounding only."
    ]

    def __post_init__(self) -> None:
        if not self.spreads:
            raise ValueError("it has no spreads")
