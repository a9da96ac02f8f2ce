"""torch.linalg for many small matrices.

Threads gain nothing on small matrices, and on a busy machine they wait for each other: the SVD of
144 matrices of size 64 took 0.08 s with one thread, and 24 s with two while another process was
running. So small matrices are decomposed by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

SMALL = 256


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: for small work, and for sums that must not depend on threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _one_thread_if_small(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(matrix: Tensor, *others: Any, **options: Any) -> Any:
        with nullcontext() if matrix.is_cuda or matrix.shape[-1] > SMALL else one_thread():
            return function(matrix, *others, **options)

    return wrapped


svd = _one_thread_if_small(torch.linalg.svd)
svdvals = _one_thread_if_small(torch.linalg.svdvals)
eigh = _one_thread_if_small(torch.linalg.eigh)
eigvals = _one_thread_if_small(torch.linalg.eigvals)
qr = _one_thread_if_small(torch.linalg.qr)
det = _one_thread_if_small(torch.linalg.det)
solve = _one_thread_if_small(torch.linalg.solve)
solve_ex = _one_thread_if_small(torch.linalg.solve_ex)


@_one_thread_if_small
def inv(matrix: Tensor) -> Tensor:
    """The inverse. On a GPU a singular matrix gives infinities: a check would synchronise."""
    return torch.linalg.inv_ex(matrix).inverse if matrix.is_cuda else torch.linalg.inv(matrix)
