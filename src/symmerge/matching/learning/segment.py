"""`Segment`: the line from A to a moving B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from symmerge.matching.learning.bundles import TensorBlock
from symmerge.matching.learning.circuits import CircuitFactors
from symmerge.matching.learning.distillation import DistillationBatch
from symmerge.matching.learning.mean_module import MeanModule
from symmerge.matching.learning.moving import MovingModel


@final
class Segment:
    """From A (`origin`) to a moving model; `t` is B's share in the mean.

    With `circuits`, each model has halves of doubled heads, and the mean is that of the circuits.
    """

    def __init__(
        self,
        origin: TensorBlock,
        member: MovingModel,
        mean: MeanModule,
        circuits: CircuitFactors | None = None,
    ) -> None:
        self.origin, self.member, self.mean, self.circuits = origin, member, mean, circuits
        self.t = torch.zeros((), device=member.device)

    @torch.no_grad()
    def place(self, t: float | None = None) -> None:
        """Write the model at `t` (default: the current one) to the mean module."""
        if t is not None:
            self.t.fill_(t)
        self.member.move()
        torch.lerp(self.origin.flat, self.member.moved.flat, self.t, out=self.mean.mean.flat)
        if self.circuits:
            self.mean.mean.flat.mul_(self.circuits.at(self.t))

    def backward(self, batches: Sequence[DistillationBatch]) -> Tensor:
        """The loss of the mean where it was placed; its gradient by B's weights."""
        loss = self.mean.backward(batches, self.t)
        if self.circuits:
            self.mean.gradient.flat.mul_(self.circuits.at(self.t))
        return loss
