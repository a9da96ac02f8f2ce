"""Weights that are read ahead: the next tensors are computed while the last one is used."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import final

import torch
from torch import Tensor

from symmerge.checkpoints.memory import workers
from symmerge.checkpoints.weights import Weights, WeightsOver
from symmerge.symmetry.groups.linalg import threads_like_this


@final
class AheadWeights(WeightsOver):
    """Another collection, whose tensors are computed in this `order`, a few before they are read.

    A tensor that is read out of turn is computed when it is read.
    """

    def __init__(self, base: Weights, order: Sequence[str], pool: ThreadPoolExecutor) -> None:
        self.base, self._order, self._pool = base, list(order), pool
        self._waiting: dict[str, Future[Tensor]] = {}
        self._next, self._lock, self._count = 0, Lock(), workers()

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:
            self._submit()
            tensor = self._waiting.pop(name, None)
            self._submit()
        return self.base[name] if tensor is None else tensor.result()

    def _submit(self) -> None:
        while self._next < len(self._order) and len(self._waiting) < self._count:
            name = self._order[self._next]
            self._waiting[name] = self._pool.submit(self._read, name)
            self._next += 1

    def _read(self, name: str) -> Tensor:
        with torch.no_grad():  # every thread has its own mode
            return self.base[name]


@contextmanager
def read_ahead(weights: Weights, order: Sequence[str]) -> Generator[Weights]:
    """The weights, read ahead where there are processors to spare; what is not read is dropped."""
    if workers() <= 2:
        yield weights
        return
    pool = threads_like_this(workers())
    try:
        yield AheadWeights(weights, order, pool)
    finally:
        pool.shutdown(cancel_futures=True)
