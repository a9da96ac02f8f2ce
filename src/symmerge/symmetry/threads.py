"""The same bytes for every number of threads.

BLAS and LAPACK round differently with another number of threads, and so do sums over whole tensors.
Inside `same_bytes` torch computes with one thread. As many workers as there were threads compute
independent parts `side_by_side`, or the tiles of a fixed size of a large product.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from symmerge.symmetry.groups.linalg import one_thread, threads_like_this

LARGE = 1 << 24  # multiplications: below, one thread takes a few milliseconds
ROWS = 256  # of a tile; must depend on nothing but shapes
Tiles = Sequence[Callable[[], Tensor]]
Item = TypeVar("Item")
Result = TypeVar("Result")
_state = threading.local()


@contextmanager
def same_bytes() -> Iterator[None]:
    """Compute the same bytes with any number of threads; also a decorator. Gradients: as usual."""
    if _pool():
        yield
        return
    workers = torch.get_num_threads()
    try:
        with one_thread(), threads_like_this(workers) as pool, _Tiling(pool):
            _state.pool, _state.workers = pool, workers
            yield
    finally:
        _state.pool = None


def _pool() -> ThreadPoolExecutor | None:
    return getattr(_state, "pool", None)


def side_by_side(
    function: Callable[[Item], Result], items: Iterable[Item], most: int | None = None
) -> Iterator[Result]:
    """The results in order, at most so many at a time, because of the memory they need.

    Workers compute them, each in one thread. Where only one may be computed at a time, and outside
    of `same_bytes`, this thread does, with tiles. So the bytes depend on `most`, never on workers.
    """
    pool = _pool()
    if pool is None or most == 1:
        yield from map(function, items)
        return
    ahead = min(most or 2 * _state.workers, 2 * _state.workers)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
            waiting.append(pool.submit(_call, partial(function, item)))
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:  # an error, or Ctrl-C
            future.cancel()


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


def _call(part: Callable[[], Result]) -> Result:
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
        # `bmm` takes no matrices
        return [partial(torch.matmul, x, y) for x, y in zip(a, b, strict=True)], torch.stack
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
