"""`Segment`: the line from A to a moving B."""

from __future__ import annotations

from typing import final

import torch

from symmerge.matching.learning.bundles import TensorBlock
from symmerge.matching.learning.mean_module import MeanModule
from symmerge.matching.learning.moving import MovingModel


@final
class Segment:
    """From A (`origin`) to a moving model; `t` is B's share in the mean."""

    def __init__(self, origin: TensorBlock, member: MovingModel, mean: MeanModule) -> None:
        self.origin, self.member, self.mean = origin, member, mean
        self.t = torch.zeros((), device=member.device)

    @torch.no_grad()
    def place(self, t: float | None = None) -> None:
        """Write the model at `t` (default: the current one) to the mean module."""
        if t is not None:
            self.t.fill_(t)
        self.member.move()
        torch.lerp(self.origin.flat, self.member.moved.flat, self.t, out=self.mean.mean.flat)
