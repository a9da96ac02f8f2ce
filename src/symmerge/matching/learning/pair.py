"""The objective of a pair: the loss of models on the line from A to a moving B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from symmerge.matching.learning.distillation import DistillationBatch
from symmerge.matching.learning.permutations import FlipSearch
from symmerge.matching.learning.samplers import Sampler
from symmerge.matching.learning.segment import Segment


@final
class PairObjective:
    """Steps are taken at the sampled t, where B's gradient is t times that of the mean."""

    def __init__(self, segment: Segment, flips: FlipSearch, sampler: Sampler) -> None:
        self.segment, self.sampler = segment, sampler
        self.mean, self.members, self.flips = segment.mean, [segment.member], [flips]

    def draw(self, generator: torch.Generator) -> None:
        self.segment.t.fill_(self.sampler.draw(generator))

    def place_midpoint(self) -> None:
        self.segment.place(0.5)

    def descend(self, batches: Sequence[DistillationBatch]) -> Tensor:
        self.segment.place()
        loss = self.segment.backward(batches)
        self.segment.member.follow(self.mean.gradient)
        return loss

    def reassign(self, batches: Sequence[DistillationBatch]) -> None:
        self.flips[0].search(self.segment, batches)
