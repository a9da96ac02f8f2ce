"""The mean of two models with heads of their own, turned into the mean of their circuits."""

from __future__ import annotations

from collections.abc import Set
from typing import final

import torch
from torch import Tensor

from symmerge.matching.learning.bundles import Layout, TensorBlock


@final
class CircuitFactors:
    """Factors of every entry of a mean of `separate_heads`: 1 / sqrt(share) inside heads.

    The mean has (1 - t) x and t y in the halves of both factors of a circuit. The factors make the
    products (1 - t) x'x and t y'y instead of (1 - t)^2 and t^2 times that.
    """

    def __init__(self, layout: Layout, spaces: Set[str], device: torch.device) -> None:
        self._first, self._second = (TensorBlock(layout.stacks, device) for _ in range(2))
        for name, pieces in layout.table.pieces.items():
            for piece in pieces:
                for position, atom in enumerate(piece.atoms):
                    if atom.space in spaces:
                        for half, block in enumerate((self._first, self._second)):
                            view = piece.view(block.tensors[name])
                            size = view.shape[position] // 2
                            view.narrow(position, half * size, size).fill_(1.0)

    def at(self, t: Tensor) -> Tensor:
        """The factors at B's share `t`; the ends themselves have none."""
        first, second = (share.clamp_min(1e-6).rsqrt() - 1 for share in (1 - t, t))
        return 1 + first * self._first.flat + second * self._second.flat
