"""Running several models at once, so that Ctrl-C or a failure of one ends the others, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from threading import Event
from typing import TypeVar

import torch

from symmerge.models.progress import Progress
from symmerge.symmetry.groups.linalg import one_thread, threads_like_this

Result = TypeVar("Result")
Job = Callable[[Progress], Result]
"""Work that reports every step it takes."""


def run_all(jobs: Iterable[Job[Result]], workers: int, progress: Progress | None) -> list[Result]:
    """The results of all jobs, of which so many run at a time."""
    stopped = Event()

    def report(step: str) -> None:
        if stopped.is_set():
            raise CancelledError
        if progress:
            progress(step)

    if workers == 1:
        return [job(report) for job in jobs]
    with one_thread(), threads_like_this(workers) as pool:
        try:
            return list(pool.map(lambda job: _without_gradients(job, report), jobs))
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _without_gradients(job: Job[Result], report: Progress) -> Result:
    with torch.no_grad():  # every thread has its own mode
        return job(report)
