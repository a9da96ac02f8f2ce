"""The same bytes for every number of threads.

BLAS and LAPACK round differently with another number of threads, and so do sums over whole tensors.
Inside `same_bytes` torch computes with one thread, and large products are cut into tiles of a fixed
size, which as many workers compute as there were threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from symmerge.symmetry.groups.linalg import one_thread

LARGE = 1 << 24  # multiplications: below, one thread takes a few milliseconds
ROWS = 256  # of a tile; must depend on nothing but shapes
Tiles = Sequence[Callable[[], Tensor]]
_state = threading.local()


@contextmanager
def same_bytes() -> Iterator[None]:
    """Compute the same bytes with any number of threads; also a decorator. Gradients: as usual."""
    if getattr(_state, "active", False):
        yield
        return
    workers, _state.active = torch.get_num_threads(), True
    try:
        # Threads of the pool are started in here: torch gives them one thread each, too.
        with one_thread(), ThreadPoolExecutor(workers) as pool, _Tiling(pool):
            yield
    finally:
        _state.active = False


class _Tiling(TorchFunctionMode):
    """Computes the tiles of large products in a pool."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self.pool = pool

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        cut = TILED.get(func)
        if cut is None or torch.is_grad_enabled() or not _plain(args):
            return func(*args, **kwargs)
        parts, join = cut(func, *args, **kwargs)
        if len(parts) < 2:
            return func(*args, **kwargs)
        return join(list(self.pool.map(_call, parts)))


def _call(part: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():  # a thread has its own mode
        return part()


def _plain(args: tuple[Any, ...]) -> bool:
    return all(not isinstance(one, Tensor) or one.device.type == "cpu" for one in args)


Cut = tuple[Tiles, Callable[[list[Tensor]], Tensor]]
WHOLE: Cut = ((), torch.stack)


def _matmul(func: Callable[..., Tensor], a: Tensor, b: Tensor, **options: Any) -> Cut:
    if options or a.ndim < 2 or b.ndim < 2 or a.numel() * b.shape[-1] < LARGE:
        return WHOLE
    if b.ndim > 2:
        if a.ndim != b.ndim or len(a) != len(b):
            return WHOLE
        return [partial(func, x, y) for x, y in zip(a, b, strict=True)], torch.stack
    if a.ndim == 2 and len(a) < b.shape[1]:
        columns = b.split(ROWS, 1)
        return [partial(func, a, some) for some in columns], partial(torch.cat, dim=1)
    return _by_rows(lambda rows: func(rows, b), a, b.shape[1])


def _linear(
    func: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Cut:
    if x.ndim < 2 or x.numel() * len(weight) < LARGE:
        return WHOLE
    return _by_rows(lambda rows: func(rows, weight, bias), x, len(weight))


def _addmm(
    func: Callable[..., Tensor], bias: Tensor, x: Tensor, matrix: Tensor, **options: Any
) -> Cut:
    if options or bias.ndim != 1 or x.numel() * matrix.shape[1] < LARGE:
        return WHOLE
    return _by_rows(lambda rows: func(bias, rows, matrix), x, matrix.shape[1])


def _by_rows(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Cut:
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1]).split(ROWS)
    shape = (*x.shape[:-1], width)
    return [partial(function, some) for some in rows], lambda parts: torch.cat(parts).view(shape)


TILED: dict[Callable[..., Any], Callable[..., Cut]] = {
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    functional.linear: _linear,
}
