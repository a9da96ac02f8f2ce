"""torch.linalg for many small matrices.

Threads gain nothing on small matrices, and on a busy machine they wait for each other: the SVD of 144 matrices of size 64 took 0.08 s with one
thread and 24 s with two while another process was running. So small ones are decomposed by one thread.
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
    """While inside, torch computes with one thread: what is too small to gain from a second, and sums that must not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _calm(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def alone(matrix: Tensor, *others: Any, **options: Any) -> Any:
        with nullcontext() if matrix.is_cuda or matrix.shape[-1] > SMALL else one_thread():
            return function(matrix, *others, **options)

    return alone


svd, svdvals, eigh, eigvals, qr = (
    _calm(f)
    for f in (
        torch.linalg.svd,
        torch.linalg.svdvals,
        torch.linalg.eigh,
        torch.linalg.eigvals,
        torch.linalg.qr,
    )
)
det, solve, solve_ex = (
    _calm(f) for f in (torch.linalg.det, torch.linalg.solve, torch.linalg.solve_ex)
)


@_calm
def inv(matrix: Tensor) -> Tensor:
    """On a GPU without the check for singular matrices, which would wait for it: those become infinite, and `check` finds them."""
    return torch.linalg.inv_ex(matrix).inverse if matrix.is_cuda else torch.linalg.inv(matrix)
