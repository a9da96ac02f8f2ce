"""Learned matching of many models at once: every member but the reference walks, down the loss of their weighted means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from symmerge.matching.learning.distillation import Lesson, Lessons
from symmerge.matching.learning.learner import Course, Learner, quick_products
from symmerge.matching.learning.samplers import Shares
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model

if TYPE_CHECKING:
    from symmerge.matching.learned import LearnedMatching


class Joint(Course):
    """The state of one run for a reference and its others. `best` has one alignment for each of the others."""

    def __init__(
        self,
        options: LearnedMatching,
        reference: Model,
        others: Sequence[Model],
        starts: Sequence[Alignment],
        lessons: Lessons,
        held: Lessons,
        spaces: list[str],
        shares: Shares,
    ) -> None:
        self._begin(options, lessons, held)
        self.members: list[Learner] = []
        for other, start in zip(others, starts, strict=True):
            self.members.append(
                Learner(
                    options,
                    reference,
                    other,
                    start,
                    lessons,
                    held,
                    spaces,
                    beside=self.members[0] if self.members else None,
                )
            )
        self.first, self.sampler = self.members[0], shares
        self.module, self.discrete, self.tally = (
            self.first.module,
            self.first.discrete,
            self.first.tally,
        )
        for member in self.members:
            member.tally = self.tally  # what is counted is counted together
        self.reference = self.first.a.whole.clone()
        self.shares = torch.zeros(len(others) + 1, device=self.device)
        self.best = list(starts)

    @property
    def walking(self) -> Sequence[Learner]:
        return self.members

    def _draw(self, generator: torch.Generator) -> None:
        self.shares.copy_(self.sampler.draw(generator, len(self.shares)))

    def _to_middle(self) -> None:
        self.shares.fill_(1 / len(self.shares))
        self._place()

    def _keep(self) -> None:
        self.best = [member.base for member in self.members]

    @torch.no_grad()
    def _place(self) -> None:
        """Put the weighted mean of all into the module, and everyone where they lie now."""
        mean = self.first.mean.whole
        torch.mul(self.reference, self.shares[0], out=mean)
        for member, share in zip(self.members, self.shares[1:], strict=True):
            member._move()
            torch.addcmul(mean, member.moved.whole, share, out=mean)

    def _descend(self, lessons: tuple[Lesson, ...]) -> None:
        with quick_products(self.device):
            self._place()
            loss = self.first._pass_back(lessons, self.shares.sum())
            with torch.no_grad():
                self.first._gather()
                for member, share in zip(self.members, self.shares[1:], strict=True):
                    if not member.parameters:  # permutations alone
                        continue
                    member._point_uphill()
                    torch._foreach_mul_([value.grad for value in member.parameters], share)  # type: ignore[reportPrivateImportUsage]
                    member._together()
                    member._walk()
                self._count(loss)

    @torch.no_grad()
    def _reassign(self) -> None:
        """One member after the other, to the mean of all others."""
        self._to_middle()
        count = len(self.members)
        for member in self.members:
            everyone = self.reference + sum(other.moved.whole for other in self.members)
            member.a.whole.copy_((everyone - member.moved.whole) / count)
            member._reassign()
            member._move()
