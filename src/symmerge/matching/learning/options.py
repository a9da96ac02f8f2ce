"""The options that learned and soft matching share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

from symmerge.errors import MismatchError
from symmerge.evaluation.tasks.base import Task
from symmerge.matching.learning.samplers import Sampler
from symmerge.matching.learning.start import Start, default_start
from symmerge.matching.learning.targets import Target
from symmerge.matching.search import Matching
from symmerge.models.alignment import Alignment


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is learned from, and what is to be answered. No data: self-generated inputs.

    The `auto` target is `parents`, or `bayes` where each parent knows a text of its own.
    """

    data: Task | None = field(default=None, repr=False)  # the task whose inputs are learned from
    steps: int = 300
    batch_size: int | None = None
    target: Target = "auto"
    mixed: bool = True  # images that are given are mixed with one another
    held_out: float = 0.1  # the share of data to evaluate on
    generated: int | None = None  # without data: how many inputs to generate
    generated_length: int | None = None  # of text, in tokens
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._require_positive("steps", "batch_size", "generated", "generated_length")
        if not 0 < self.held_out < 1:
            raise MismatchError(f"held_out {self.held_out}: give a number above 0 and below 1")
        if self.target not in get_args(Target):
            raise MismatchError(
                f"target {self.target}: choose one of {', '.join(get_args(Target))}"
            )
        if self.data and self.target == "labels":
            self.data.check_labels()

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise MismatchError(f"{name} {value}: give a number above 0")


@dataclass(frozen=True, kw_only=True)
class LearningOptions(DataOptions):
    """How elements are learned. No start: `default_start`."""

    start: Matching | Alignment | Literal["identity"] | None = None
    lr: float
    sampler: str = "narrow"  # where on the line between two models to learn
    spaces: tuple[str, ...] | None = None  # what moves: residual, heads, ff, classifier, or spaces
    method: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        Sampler(self.sampler)
        self._require_positive("lr")

    def record(self) -> dict[str, object]:
        """The options, for solution.json."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        start = self.start_solver()
        if isinstance(start, Matching):
            values["start"] = start.record()
        else:
            values["start"] = "identity" if start == "identity" else "alignment"
        return {**values, "data": self.data.to_record().to_json() if self.data else "self"}

    def start_solver(self) -> Start:
        if self.start is None:
            return default_start(self.data, seed=self.seed, device=self.device)
        return self.start
