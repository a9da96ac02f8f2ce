"""The objective of many models: the loss of their weighted means. The reference stays fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from symmerge.matching.learning.bundles import TensorBlock
from symmerge.matching.learning.distillation import DistillationBatch
from symmerge.matching.learning.mean_module import MeanModule
from symmerge.matching.learning.moving import MovingModel
from symmerge.matching.learning.permutations import FlipSearch
from symmerge.matching.learning.samplers import Shares
from symmerge.matching.learning.segment import Segment


@final
class JointObjective:
    """`shares` holds the weights of the reference and of each member in the mean."""

    def __init__(
        self,
        reference: TensorBlock,
        members: Sequence[MovingModel],
        flips: Sequence[FlipSearch],
        mean: MeanModule,
        sampler: Shares,
    ) -> None:
        self.reference, self.members, self.flips = reference, list(members), list(flips)
        self.mean, self.sampler = mean, sampler
        device = reference.flat.device
        self.shares = torch.zeros(len(members) + 1, device=device)
        self.others = TensorBlock(list(reference.stacks), device)  # the mean of all others
        self.segments = [Segment(self.others, member, mean) for member in members]

    def draw(self, generator: torch.Generator) -> None:
        self.shares.copy_(self.sampler.draw(generator, len(self.shares)))

    def place_midpoint(self) -> None:
        self.shares.fill_(1 / len(self.shares))
        self.place()

    @torch.no_grad()
    def place(self) -> None:
        """Put the weighted mean of all into the mean module."""
        mean = self.mean.mean.flat
        torch.mul(self.reference.flat, self.shares[0], out=mean)
        for member, share in zip(self.members, self.shares[1:], strict=True):
            member.move()
            torch.addcmul(mean, member.moved.flat, share, out=mean)

    def descend(self, batches: Sequence[DistillationBatch]) -> Tensor:
        self.place()
        loss = self.mean.backward(batches, self.shares.sum())
        for member, share in zip(self.members, self.shares[1:], strict=True):
            member.follow(self.mean.gradient, share)
        return loss

    @torch.no_grad()
    def reassign(self, batches: Sequence[DistillationBatch]) -> None:
        """Reassign one member after another, against the mean of all others."""
        self.place_midpoint()
        for segment, flips in zip(self.segments, self.flips, strict=True):
            moved = segment.member.moved.flat
            total = self.reference.flat + sum(member.moved.flat for member in self.members)
            self.others.flat.copy_((total - moved) / len(self.members))
            flips.search(segment, batches)
            segment.member.move()
