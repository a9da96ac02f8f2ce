"""Permutations while learning: reassign at intervals, and keep what lowers the loss.

Straight-through: the gradient by each pair of positions estimates what a swap would gain. The
assignment is solved between the current weights and a step down that gradient. Few positions
flip at a time; flips are counted, and undone where they do not help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from symmerge.distributed import decided_by_first
from symmerge.matching.learning.distillation import DistillationBatch
from symmerge.matching.learning.gradients import RoleGradients, over_roles, space_gradients
from symmerge.matching.learning.segment import Segment
from symmerge.models.alignment import Alignment
from symmerge.symmetry.groups.indices import assign

# Where gradients for flips are taken: at the midpoint two swapped units have the same mean, and
# the gradient does not see the swap.
NEAR_A = 0.25


def reassign(gram: Tensor, gradient: Tensor, share: float) -> Tensor:
    """The permutation nearest to a step down the gradient.

    `gram` is the moved weights times their transpose, `gradient` their gradient times the same. A
    step of length r makes the best assignment that of `gram - r gradient`; r is chosen so that
    about `share` of the positions would gain by a pairwise swap.
    """
    n = gram.shape[-1]
    own, gain = (matrix.diagonal(dim1=-2, dim2=-1) for matrix in (gram, gradient))
    apart = own[..., :, None] + own[..., None, :] - gram - gram.mT
    gained = gain[..., :, None] + gain[..., None, :] - gradient - gradient.mT
    ratio = torch.where(gained > 0, apart.clamp_min(0) / gained, torch.inf)
    nearest = ratio.flatten(0, -2).amin(-1).sort().values
    at = min(len(nearest) - 1, max(1, math.ceil(share * len(nearest))))
    length = nearest[at] * 1.01  # just past the last: at exactly that length rounding decides
    if not bool(length.isfinite()):
        return torch.arange(n).expand(gram.shape[:-1]).clone()
    return assign(gram - length * gradient)


@final
class FlipSearch:
    """Proposes permutations of one moving model, one kind of space at a time, and tries them.

    Two proposals alternate: a step down the gradient, and the best match of the current weights.
    """

    def __init__(self, spaces: Sequence[str], max_share: float) -> None:
        self.spaces, self.max_share = list(spaces), max_share
        self.kinds: dict[str, list[str]] = {}
        for name in self.spaces:
            self.kinds.setdefault(name.partition(".")[0], []).append(name)
        self.shares, self.turns = dict.fromkeys(self.kinds, max_share), 0
        self.tried, self.kept = 0, 0

    @torch.no_grad()
    def search(self, segment: Segment, batches: Sequence[DistillationBatch]) -> None:
        """Solve the assignments again, and keep those that lower the loss of these batches."""
        self.turns += 1
        gradients = self.gradients(segment, batches) if self.turns % 2 else {}
        segment.place(0.5)
        loss = segment.mean.loss(batches)
        for kind, names in self.kinds.items():
            indices = self._proposal(segment, kind, names, gradients)
            moved = [index != torch.arange(index.shape[-1]) for index in indices.values()]
            flips = sum(int(changed.sum()) for changed in moved)
            if flips:
                loss = self._try(segment, batches, kind, indices, flips, loss)

    def gradients(
        self, segment: Segment, batches: Sequence[DistillationBatch]
    ) -> dict[str, RoleGradients]:
        """The gradient for each pair of positions, by space."""
        segment.place(NEAR_A)
        segment.backward(batches)
        member = segment.member
        return space_gradients(
            member.layout.table, self.spaces, segment.mean.gradient.tensors, member.moved.tensors
        )

    def _proposal(
        self, segment: Segment, kind: str, names: list[str], gradients: Mapping[str, RoleGradients]
    ) -> dict[str, Tensor]:
        table, moved = segment.member.layout.table, segment.member.moved.tensors
        if not gradients:
            similar = space_gradients(table, names, segment.origin.tensors, moved)
            return {name: assign(over_roles(score)) for name, score in similar.items()}
        grams, share = space_gradients(table, names, moved, moved), self.shares[kind]
        return {
            name: reassign(over_roles(grams[name]), over_roles(gradients[name]), share)
            for name in names
        }

    def _try(
        self,
        segment: Segment,
        batches: Sequence[DistillationBatch],
        kind: str,
        indices: Mapping[str, Tensor],
        flips: int,
        before: float,
    ) -> float:
        """The loss after a proposal; if it does not help, undo it and allow fewer flips."""
        member = segment.member
        here = member.alignment()
        member.fold(_flipped(here, indices))
        segment.place()
        after = segment.mean.loss(batches)
        self.tried += flips
        if decided_by_first(lambda: after < before):
            self.kept += flips
            self.shares[kind] = min(self.max_share, self.shares[kind] * 1.5)
            return after
        member.fold(here)
        segment.place()
        self.shares[kind] /= 2
        return before


def _flipped(alignment: Alignment, indices: Mapping[str, Tensor]) -> Alignment:
    identity = Alignment.identity(alignment.spec)
    flips = {name: {**identity[name], "index": index} for name, index in indices.items()}
    return Alignment(alignment.spec, {**identity.elements, **flips}).compose(alignment)
