"""Learning-rate schedules: a linear warm-up, then a cosine or a straight line down to zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

Curve = Literal["cosine", "epochs", "linear"]


@final
@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate of every step: `LearningRate(lr=1e-3, steps=100, warmup=10).at(0)`.

    `curve` "epochs" is a cosine with one stair per `epoch` steps. The decay begins after the
    warm-up, or with `overlap` at the first step; then the lower of both counts.
    """

    lr: float
    steps: int
    warmup: int = 0
    curve: Curve = "cosine"
    epoch: int = 1
    overlap: bool = False

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        >>> [round(LearningRate(lr=1.0, steps=4, warmup=2).at(step), 2) for step in range(4)]
        [0.5, 1.0, 1.0, 0.5]
        """
        if self.overlap:
            ramp = (step + 1) / max(1, self.warmup)
            return self.lr * min(ramp, _cosine(math.pi * (step + 1) / (self.steps + 1)))
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        step = step // self.epoch * self.epoch if self.curve == "epochs" else step
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (1 - done if self.curve == "linear" else _cosine(math.pi * done))


def _cosine(angle: float) -> float:
    return 0.5 * (1 + math.cos(angle))
