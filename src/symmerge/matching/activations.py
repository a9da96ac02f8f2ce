"""Activation matching: align B to A by what flows through both on the same inputs, alone or beside the weights.

Weights say what a model can do, activations what it does. The search starts with both and tries other mixtures of them, scored on inputs that
were held out; the published method (permutations by correlation) is the same solver with other options, in `recipes`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.evaluation.tasks.base import Task
from symmerge.matching.search import Matching, WeightingGrid
from symmerge.models.model import Model, Progress
from symmerge.observation.activations import restrict_stream
from symmerge.observation.calibration import calibrate, pair_header
from symmerge.observation.probe import Probe, make_probe
from symmerge.observation.statistics import Statistics

GRID: WeightingGrid = {
    "stream": (0.0, 0.3, 3.0),
    "score": ("covariance",),
    "weights": (0.3, 0.0),
    "norm": (1.0, 0.0),
    "units": (0.3, 3.0),
    "heads": (0.3, 3.0),
    "frequency": (0.5, 1.0),
}
FEWEST = 2  # samples per coordinate: with fewer, correlations are mostly chance


@final
@dataclass(frozen=True)
class ActivationMatching(Matching):
    """Options of activation matching: `ActivationMatching(data=make_task("image", "digits", [a, b]))`.

    `data` is a task whose inputs both models see (its labels are not used); None lets language models write their own text. `statistics` gathered
    before (for the same pair) save the pass over the data. `places` says where the stream is looked at. `held_out` is the share of the data that
    merges are scored on; with 0, `weighting` is taken as it is. A `weighting` that is given keeps its score: only the rest is searched over.
    `partial` is where an interrupted pass leaves what it had.
    """

    data: Task | None = field(default=None, repr=False)
    statistics: Statistics | None = field(default=None, repr=False, compare=False)
    places: Literal["all", "first", "last"] = "all"
    held_out: float = 0.25
    partial: Path | None = field(default=None, repr=False, compare=False)
    method: ClassVar[str] = "activations"

    def probe(self, a: Model, b: Model, progress: Progress) -> Probe | None:
        if self.data is None and self.statistics is None:
            found = make_probe([a, b], seed=self.seed, device=self.device)
            if found is None:
                raise MismatchError(
                    f"{a.where} writes no text of its own (no language model, or too large): give data to see activations on"
                )
            return replace(
                found, observation=restrict_stream(found.observation, a.spec.stream, self.places)
            )
        if self.statistics is not None:
            self.statistics.header.check(pair_header(a, b))
        progress("looking at what flows through both models")
        if self.data is None:
            assert self.statistics is not None
            found = Probe("the objective", self.statistics)
        else:
            options: dict[str, Any] = {
                "held_out": self.held_out,
                "partial": self.partial,
                "device": self.device,
            }
            found = calibrate(
                (a, b), self.data, statistics=self.statistics, progress=progress, **options
            )
        seen = found.observation
        assert isinstance(seen, Statistics)
        doubts(seen)
        return replace(found, observation=restrict_stream(seen, a.spec.stream, self.places))

    @property
    def grid(self) -> WeightingGrid:
        return {
            name: values
            for name, values in GRID.items()
            if name != "score" or self.weighting is None
        }

    def _options(self) -> dict[str, Any]:
        plain = replace(self, data=None, statistics=None, partial=None, token_counts=None)
        about = (
            self.data.record()
            if self.data
            else {
                "data": (list(self.statistics.header.inputs) or None) if self.statistics else "self"
            }
        )
        return {
            **super(ActivationMatching, plain)._options(),
            "data": about,
            "statistics": None,
            "partial": None,
        }


def doubts(found: Statistics) -> None:
    """Warn of too few samples and of constant coordinates: neither stops the solver, both may mislead it."""
    widest = max(len(moments.sum_a) for moments in found.moments.values())
    if found.samples < FEWEST * widest:
        few = f"{found.samples} tokens for spaces of up to {widest} coordinates: correlations are mostly chance; give {FEWEST * widest} or more"
        warnings.warn(few, SymmergeWarning, stacklevel=2)
    if constant := sum(moments.constant for moments in found.moments.values()):
        warnings.warn(
            f"{constant} coordinates never change on this data: nothing is known of them",
            SymmergeWarning,
            stacklevel=2,
        )
