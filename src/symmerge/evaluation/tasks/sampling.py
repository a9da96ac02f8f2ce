"""How many samples a task draws from its data, and which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from symmerge.errors import DataError
from symmerge.models.progress import Progress

Part = Literal["all", "learn", "judge"]
"""Which samples: all, those to learn from, or those set aside for a verdict."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Exactly `samples`, else at most `max_samples`, else the task's default.

    `device` is where models sample text, `length` how many tokens a block of text has; `progress`
    hears of every token that is sampled. `part` leaves out what a merge is judged on, or takes it.
    """

    samples: int | None = None
    max_samples: int | None = None
    length: int | None = None
    seed: int = 0
    device: str = "cpu"
    progress: Progress | None = None
    part: Part = "all"

    def limit(self, default: int) -> int:
        """The largest number of samples to take."""
        return self.samples or self.max_samples or default

    def choose(self, available: int, default: int, *, what: str) -> list[int]:
        """A random choice of the available samples, the same for the same seed."""
        judged = 0 if self.part == "all" else max(1, min(default, available // 5))
        there, needed = max(0, available - judged), self.samples or 1
        if there < needed:
            aside = f", {judged} of them set aside for the verdict" if judged else ""
            fewer = "ask for fewer samples or " if there else ""
            raise DataError(
                f"{what}: {available} available{aside}, {needed} needed: {fewer}give more data"
            )
        order = torch.randperm(available, generator=torch.Generator().manual_seed(self.seed))
        if self.part == "judge":
            return order[there:].tolist()
        return order[: min(self.limit(default), there)].tolist()
