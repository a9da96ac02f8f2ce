"""Lazy collections of tensors: from files, from memory, or derived from another collection tensor by tensor.

Reading gives the working precision (float64 stays, everything else becomes float32), because bfloat16 products are slow,
inexact, and fatal on some processors. `dtype` remembers how a tensor is stored.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import final

import torch
from torch import Tensor

from symmerge.errors import CheckpointError

Shape = tuple[int, ...]
KEPT_BYTES = 1_500_000_000  # of one model


def working(dtype: torch.dtype) -> torch.dtype:
    """The precision in which a stored tensor is computed with."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Weights(ABC):
    """Named tensors, read one at a time."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every tensor, in the order it is stored."""

    @abstractmethod
    def shape(self, name: str) -> Shape:
        """Known without reading."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The stored precision, known without reading."""

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor:
        """The tensor in its working precision."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self.names()


class StoredWeights(Weights):
    """Tensors that exist somewhere, in their stored precision."""

    @abstractmethod
    def raw(self, name: str) -> Tensor:
        """The tensor as stored."""

    @abstractmethod
    def select(self, stored_as: Mapping[str, str]) -> StoredWeights:
        """Some of the tensors, in the order and under the names given: name -> name here."""

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.raw(name)
        return tensor.to(working(tensor.dtype))


@final
@dataclass(frozen=True)
class MemoryWeights(StoredWeights):
    """Tensors in memory, or mapped into it."""

    tensors: Mapping[str, Tensor]

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> Shape:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def raw(self, name: str) -> Tensor:
        return self.tensors[name]

    def select(self, stored_as: Mapping[str, str]) -> StoredWeights:
        return MemoryWeights({name: self.tensors[stored] for name, stored in stored_as.items()})


@final
class DerivedWeights(Weights):
    """Another collection with some tensors computed anew, added or removed; nothing is computed until it is read."""

    def __init__(
        self,
        base: Weights,
        computed: Mapping[str, Callable[[], Tensor]],
        *,
        added: Mapping[str, tuple[Shape, torch.dtype]] | None = None,
    ) -> None:
        self._base, self._computed, self._added = base, computed, dict(added or {})

    def names(self) -> list[str]:
        return [*self._base.names(), *self._added]

    def shape(self, name: str) -> Shape:
        return self._added[name][0] if name in self._added else self._base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._added[name][1] if name in self._added else self._base.dtype(name)

    def __getitem__(self, name: str) -> Tensor:
        compute = self._computed.get(name)
        if compute is None:
            return self._base[name]
        tensor = compute()
        assert tuple(tensor.shape) == self.shape(name), (
            f"{name}: computed {tuple(tensor.shape)}, expected {self.shape(name)}"
        )
        return tensor


@final
class CachedWeights(Weights):
    """Another collection whose tensors stay in memory once read; beyond `limit` bytes, only those used last."""

    def __init__(self, base: Weights, limit: int = KEPT_BYTES) -> None:
        self.base, self._limit, self._lock = base, limit, Lock()
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def names(self) -> list[str]:
        return self.base.names()

    def shape(self, name: str) -> Shape:
        return self.base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.base.dtype(name)

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:  # checkpoints are written by two threads
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        tensor = self.base[name]
        with self._lock:
            self._kept[name] = tensor
            while (
                len(self._kept) > 1
                and sum(kept.nbytes for kept in self._kept.values()) > self._limit
            ):
                self._kept.popitem(last=False)
        return tensor


@final
@dataclass
class CheckedWeights(Weights):
    """Another collection whose tensors are checked to be finite and hashed as they are read, each once."""

    base: StoredWeights
    where: str
    digests: dict[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        return self.base.names()

    def shape(self, name: str) -> Shape:
        return self.base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.base.dtype(name)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.base.raw(name)
        if name not in self.digests:
            self._check(name, tensor)
            self.digests[name] = digest(tensor)
        return tensor.to(working(tensor.dtype))

    def _check(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
            bad = int((~tensor.isfinite()).sum())
            raise CheckpointError(
                f"{self.where}: {name} has {bad} entries that are NaN or infinite: training diverged or the file is damaged; use another checkpoint"
            )

    def digest(self) -> str:
        """One hash of every name, precision, shape and value; reads what has not been read yet."""
        total = hashlib.sha256()
        for name in sorted(self.names()):
            if name not in self.digests:
                self[name]
            total.update(
                f"{name} {self.dtype(name)} {self.shape(name)} {self.digests[name]}\n".encode()
            )
        return total.hexdigest()


def digest(tensor: Tensor) -> str:
    """The hash of a tensor's bytes."""
    return hashlib.sha256(buffer(tensor.contiguous())).hexdigest()


def buffer(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, shared with it."""
    return (
        memoryview(tensor.reshape(-1).view(torch.uint8).cpu().numpy())
        if tensor.numel()
        else memoryview(b"")
    )  # pyright: ignore[reportArgumentType]
