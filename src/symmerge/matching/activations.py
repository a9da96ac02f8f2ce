"""Activation matching: align B to A by activations on the same inputs, with or without the weights.

The search starts with both and tries other mixtures, scored on inputs that were held out. The
published method (permutations by correlation) is this solver with other options, in `recipes`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, final

from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.evaluation.tasks.base import Task
from symmerge.matching.search import Matching, WeightingGrid
from symmerge.models.model import Model
from symmerge.models.progress import Phase, Progress
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
@dataclass(frozen=True, kw_only=True)
class ActivationMatching(Matching):
    """Options of activation matching: `ActivationMatching(data=make_task(...))`.

    | option | meaning |
    |---|---|
    | `data` | a task whose inputs both models see, labels unused; None: self-generated text |
    | `statistics` | gathered before for the same pair: saves the pass over the data |
    | `places` | where the stream is observed |
    | `held_out` | the share of the data that merges are scored on; 0: no search |
    | `partial` | the file where an interrupted pass stores its statistics |

    A given `weighting` keeps its `score`; only its other fields are searched over.
    """

    data: Task | None = field(default=None, repr=False)
    statistics: Statistics | None = field(default=None, repr=False, compare=False)
    places: Literal["all", "first", "last"] = "all"
    held_out: float = 0.25
    partial: Path | None = field(default=None, repr=False, compare=False)
    method: ClassVar[str] = "activations"

    def probe(self, a: Model, b: Model, progress: Progress) -> Probe | None:
        if self.data is None and self.statistics is None:
            progress(Phase("sampling text from both models"))
            probe = self._self_generated(a, b)
        else:
            progress(Phase("observing the activations of both models"))
            probe = self._observe(a, b, progress)
        observation = restrict_stream(probe.observation, a.spec.stream, self.places)
        return replace(probe, observation=observation)

    def _self_generated(self, a: Model, b: Model) -> Probe:
        probe = make_probe([a, b], seed=self.seed, device=self.device)
        if probe is None:
            raise MismatchError(
                f"no text can be sampled from {a.where} (no language model, or too large):"
                " give data to observe activations on"
            )
        return probe

    def _observe(self, a: Model, b: Model, progress: Progress) -> Probe:
        statistics = self.statistics
        if statistics is not None:
            statistics.check(pair_header(a, b), a.spec)
        if self.data is None:
            assert statistics is not None
            probe = Probe("the objective", statistics)
        else:
            probe = calibrate(
                (a, b),
                self.data,
                held_out=self.held_out,
                statistics=statistics,
                partial=self.partial,
                device=self.device,
                progress=progress,
            )
        assert isinstance(probe.observation, Statistics)
        warn_of_poor_statistics(probe.observation)
        return probe

    @property
    def grid(self) -> WeightingGrid:
        if self.weighting is None:
            return GRID
        return {name: values for name, values in GRID.items() if name != "score"}

    def _options(self) -> dict[str, object]:
        plain = replace(self, data=None, statistics=None, partial=None, token_counts=None)
        data = self._data_record()
        options = super(ActivationMatching, plain)._options()
        return {**options, "data": data, "statistics": None, "partial": None}

    def _data_record(self) -> dict[str, object]:
        if self.data:
            return self.data.to_record().to_json()
        if self.statistics:
            inputs = [task.to_json() for task in self.statistics.header.inputs]
            return {"data": inputs or None}
        return {"data": "self"}


def warn_of_poor_statistics(statistics: Statistics) -> None:
    """Warn of too few samples and of constant coordinates: both may mislead the solver."""
    widest = max(len(moments.sum_a) for moments in statistics.moments.values())
    if statistics.samples < FEWEST * widest:
        few = (
            f"{statistics.samples} tokens for spaces of up to {widest} coordinates:"
            f" correlations are mostly chance; give {FEWEST * widest} or more"
        )
        warnings.warn(few, SymmergeWarning, stacklevel=2)
    if constant := sum(moments.constant for moments in statistics.moments.values()):
        unknown = f"{constant} coordinates never change on this data: nothing is known of them"
        warnings.warn(unknown, SymmergeWarning, stacklevel=2)
