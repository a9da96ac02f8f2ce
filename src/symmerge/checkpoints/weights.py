"""Lazy collections of tensors: from files, from memory, or derived from another collection.

Reading gives the working precision (float64 stays, everything else becomes float32), because
bfloat16 products are slow, inexact, and fatal on some processors. `dtype` is the stored precision.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from threading import Lock
from typing import final

import torch
from torch import Tensor

from symmerge.errors import CheckpointError

Shape = tuple[int, ...]
LARGEST = 1e12  # of a weight: products of three still fit float32
CACHE_BYTES = 1_500_000_000  # of one model


def working(dtype: torch.dtype) -> torch.dtype:
    """The precision to compute in for a stored precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Weights(ABC):
    """Named tensors, read one at a time."""

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, in stored order."""

    @abstractmethod
    def shape(self, name: str) -> Shape:
        """The shape, known without reading."""

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

    def __repr__(self) -> str:
        count = sum(torch.Size(self.shape(name)).numel() for name in self)
        dtypes = sorted({str(self.dtype(name)).removeprefix("torch.") for name in self})
        return (
            f"<{type(self).__name__}: {len(self.names())} tensors,"
            f" {count:,} parameters, {', '.join(dtypes)}>"
        )


class WeightsOver(Weights):
    """Another collection that is read in another way: the same names, shapes and precisions."""

    base: Weights

    def names(self) -> list[str]:
        return self.base.names()

    def shape(self, name: str) -> Shape:
        return self.base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.base.dtype(name)


def stored_bytes(weights: Weights, name: str) -> int:
    """The size of a tensor in bytes, as stored."""
    return torch.Size(weights.shape(name)).numel() * weights.dtype(name).itemsize


class StoredWeights(Weights):
    """Tensors that exist somewhere, in their stored precision."""

    @abstractmethod
    def raw(self, name: str) -> Tensor:
        """The tensor as stored."""

    @abstractmethod
    def select(self, stored_as: Mapping[str, str]) -> StoredWeights:
        """A subset of the tensors, renamed and reordered: new name -> name here."""

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.raw(name)
        return tensor.to(working(tensor.dtype))


@final
@dataclass(frozen=True, repr=False)
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
    """Another collection with some tensors computed or added; each is computed when it is read."""

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
@dataclass(frozen=True, repr=False)
class ConvertedWeights(Weights):
    """Another collection in another stored precision; each tensor is rounded when it is read."""

    base: Weights
    stored: torch.dtype

    def names(self) -> list[str]:
        return self.base.names()

    def shape(self, name: str) -> Shape:
        return self.base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.stored

    def __getitem__(self, name: str) -> Tensor:
        return self.base[name].to(self.stored).to(working(self.stored))


@final
@dataclass(frozen=True, repr=False)
class PlacedWeights(WeightsOver):
    """Another collection whose tensors are copied to a device as they are read."""

    base: Weights
    device: torch.device

    def __getitem__(self, name: str) -> Tensor:
        return self.base[name].to(self.device)


@final
class CachedWeights(WeightsOver):
    """Another collection with an LRU cache: tensors stay in memory, up to `limit` bytes."""

    def __init__(self, base: Weights, limit: int = CACHE_BYTES) -> None:
        self.base, self._limit, self._lock = base, limit, Lock()
        self._cache: OrderedDict[str, Tensor] = OrderedDict()

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:  # checkpoints are written by two threads
            if name in self._cache:
                self._cache.move_to_end(name)
                return self._cache[name]
        tensor = self.base[name]
        with self._lock:
            self._cache[name] = tensor
            while len(self._cache) > 1 and self._bytes() > self._limit:
                self._cache.popitem(last=False)
        return tensor

    def _bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._cache.values())


def fitting(weights: Weights, room: int, dtype: torch.dtype | None = None) -> Iterator[str]:
    """The first tensors that fit into so many bytes, in this precision or their working one."""
    for name in weights.names():
        held = dtype or working(weights.dtype(name))
        room -= torch.Size(weights.shape(name)).numel() * held.itemsize
        if room < 0:
            return
        yield name


@final
@dataclass(repr=False)
class CheckedWeights(Weights):
    """Another collection whose tensors are checked and hashed when first read."""

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
        largest = _largest(tensor)
        if not largest <= LARGEST:  # NaN is neither
            problem = f"{int((~tensor.isfinite()).sum())} entries that are NaN or infinite"
            if isfinite(largest):
                problem = f"entries up to {largest:.0e}, with which float32 cannot compute"
            raise CheckpointError(
                f"{self.where}: {name} has {problem}: training diverged or the file is damaged;"
                " use another checkpoint"
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


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite."""
    return isfinite(_largest(tensor))


def _largest(tensor: Tensor) -> float:
    """The largest size of an entry, NaN if one is; without a mask in memory."""
    if not tensor.numel():
        return 0.0
    low, high = (bound.item() for bound in torch.aminmax(tensor))  # NaN gives NaN for both
    return max(-low, high)


def digest(tensor: Tensor) -> str:
    """The hash of a tensor's bytes."""
    return hashlib.sha256(buffer(tensor.contiguous())).hexdigest()


def buffer(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, shared with it."""
    if not tensor.numel():
        return memoryview(b"")
    array = tensor.reshape(-1).view(torch.uint8).cpu().numpy()
    return memoryview(array)  # pyright: ignore[reportArgumentType]
