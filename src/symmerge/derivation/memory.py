"""Tensors that share memory: after one is written into, what others hold is out of date."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SharedMemory:
    """The tensors in every piece of memory, and by which operation some are out of date."""

    tensors: dict[int, list[Tensor]] = field(default_factory=dict)
    stale: dict[int, str] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        """A tensor with what it holds now."""
        known = self.tensors.setdefault(tensor.untyped_storage().data_ptr(), [])
        if not any(one is tensor for one in known):
            known.append(tensor)
        self.stale.pop(id(tensor), None)

    def written(self, tensor: Tensor, operation: str) -> None:
        """An operation wrote into this tensor: others that hold a number of it are out of date."""
        known = self.tensors.get(tensor.untyped_storage().data_ptr(), [])
        for other in known:
            if other is not tensor and _overlap(tensor, other):
                self.stale[id(other)] = operation


def in_part(tensor: Tensor) -> bool:
    """Whether a tensor is a part of its memory."""
    size = max(tensor.element_size(), 1)
    return tensor.numel() != tensor.untyped_storage().nbytes() // size


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether they share a number: halves of one axis lie between each other and share none."""
    numbers = one.untyped_storage().nbytes() // max(one.element_size(), 1)
    places = torch.zeros(numbers, dtype=torch.bool)
    places.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(places.as_strided(other.shape, other.stride(), other.storage_offset()).any())
