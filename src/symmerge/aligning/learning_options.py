"""Options of learned and soft matching, as on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import get_args

from symmerge.aligning.choices import check_choice
from symmerge.evaluation.tasks import Task
from symmerge.matching.learning.start import activation_start
from symmerge.matching.learning.targets import Target
from symmerge.matching.weights import WeightMatching

TARGETS, STARTS = get_args(Target), ("weights", "activations", "identity")
SOLVER_FIELDS = {"start_from": "start"}  # option -> solver field, where the names differ


@dataclass(frozen=True, kw_only=True)
class LearningOverrides:
    """Options of learned and soft matching; None keeps the recipe's value."""

    steps: int | None = None
    epochs: float | None = None
    lr: float | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    sampler: str | None = None
    concentration: float | None = None
    target: str | None = None
    spaces: str | Sequence[str] | None = None
    start_from: str | None = None
    patience: int | None = None

    def for_solver(self, looked_at: Task | None) -> dict[str, object]:
        """These options as keyword arguments of a solver; a start may look at inputs."""
        check_choice("--target", self.target, TARGETS)
        check_choice("--start-from", self.start_from, STARTS)
        values = {option.name: getattr(self, option.name) for option in fields(LearningOverrides)}
        if self.start_from == "weights":
            values["start_from"] = WeightMatching()
        if self.start_from == "activations":
            values["start_from"] = activation_start(looked_at)
        if isinstance(self.spaces, str):
            values["spaces"] = tuple(name.strip() for name in self.spaces.split(","))
        return {SOLVER_FIELDS.get(name, name): value for name, value in values.items()}
