"""How many samples a task draws from its data, and which."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from symmerge.errors import DataError
from symmerge.models.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Exactly `samples`, else at most `max_samples`, else the task's default.

    `device` is where models sample text, `length` how many tokens a block of text has; `progress`
    hears of every token that is sampled.
    """

    samples: int | None = None
    max_samples: int | None = None
    length: int | None = None
    seed: int = 0
    device: str = "cpu"
    progress: Progress | None = None

    def limit(self, default: int) -> int:
        """The largest number of samples to take."""
        return self.samples or self.max_samples or default

    def choose(self, available: int, default: int, *, what: str) -> list[int]:
        """A random choice of the available samples, the same for the same seed."""
        needed = self.samples or 1
        if available < needed:
            fewer = "ask for fewer samples or " if available else ""
            raise DataError(f"{what}: {available} there, {needed} needed: {fewer}give more data")
        order = torch.randperm(available, generator=torch.Generator().manual_seed(self.seed))
        return order[: self.limit(default)].tolist()
