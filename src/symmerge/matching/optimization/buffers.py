"""Tensors that steps update in place on the device, as CUDA graphs require."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor


@torch.no_grad()
def copy_all(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy many tensors in one or two kernels; dtypes may differ."""
    if targets:
        copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy(list(targets), list(sources))


@final
class StepLosses:
    """`values` holds a loss per step; `step` counts the steps."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.values = torch.zeros(steps, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)

    def add(self, loss: Tensor) -> None:
        self.values.index_copy_(0, self.step, loss.detach().view(1))
        self.step.add_(1)

    def first_not_finite(self) -> int | None:
        """The first step, counted from 1, whose loss is not finite. Waits for the device."""
        wrong = (~self.values[: int(self.step)].isfinite()).nonzero()
        return int(wrong[0]) + 1 if len(wrong) else None
