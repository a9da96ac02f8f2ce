"""torch.linalg with one thread, and sums: the same bytes for every number of threads.

LAPACK's rounding depends on the number of threads, and so does a sum over a whole large tensor.
One thread loses little: the SVD of a 768 x 768 matrix took 0.24 s of processor time with one thread
and 6 s with two; that of 144 matrices of size 64 took 0.08 s, and 24 s with two while another
process was running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from symmerge.errors import OVERFLOW, SymmetryError

PART = 1 << 15  # numbers that are summed in their own precision: 128 kB stay in the cache


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: for small work, and for sums that must not depend on threads."""
    threads = torch.get_num_threads()
    if threads == 1:  # setting it again costs more than a small decomposition
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_like_this(workers: int) -> ThreadPoolExecutor:
    """A pool whose workers compute with as many threads each as this one.

    A new thread asks the environment, not the thread that started it. Leaving `one_thread`, it
    would set MKL, whose number is one for all threads, to that.
    """
    threads = torch.get_num_threads()
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,))


def _with_one_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(matrix: Tensor, *others: Any, **options: Any) -> Any:
        with nullcontext() if matrix.is_cuda else one_thread():
            try:
                return function(matrix, *others, **options)
            except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
                if matrix.isfinite().all():
                    raise
                raise SymmetryError(
                    f"in a matrix of {matrix.shape[-1]} rows, {OVERFLOW}"
                ) from error

    return wrapped


svd = _with_one_thread(torch.linalg.svd)
svdvals = _with_one_thread(torch.linalg.svdvals)
eigh = _with_one_thread(torch.linalg.eigh)
eigvals = _with_one_thread(torch.linalg.eigvals)
qr = _with_one_thread(torch.linalg.qr)
det = _with_one_thread(torch.linalg.det)
solve = _with_one_thread(torch.linalg.solve)
solve_ex = _with_one_thread(torch.linalg.solve_ex)


@_with_one_thread
def inv(matrix: Tensor) -> Tensor:
    """The inverse. On a GPU a singular matrix gives infinities: a check would synchronise."""
    return torch.linalg.inv_ex(matrix).inverse if matrix.is_cuda else torch.linalg.inv(matrix)


def total(values: Tensor) -> Tensor:
    """The sum of all entries: `values.sum()` adds up in an order that depends on threads."""
    with nullcontext() if values.is_cuda else one_thread():
        return values.sum()


def squares(values: Tensor, less: Tensor | None = None) -> float:
    """The sum of squares of all entries, or of all differences.

    In parts, because memory for 1 GB of squares takes as long as what is computed there.
    """
    if values.is_cuda:
        return float(total((values if less is None else values - less).square()))
    parts = values.reshape(-1).split(PART)
    others = [None] * len(parts) if less is None else less.reshape(-1).split(PART)
    with one_thread():
        sums = [_squares(part, other) for part, other in zip(parts, others, strict=True)]
        return float(torch.stack(sums).sum())


def _squares(part: Tensor, less: Tensor | None) -> Tensor:
    part = part if less is None else part - less
    return part.dot(part).double()
