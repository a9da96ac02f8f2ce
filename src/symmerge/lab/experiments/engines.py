"""Engines compute cells; the local one uses processes on this machine.

A worker that dies loses only its current cell.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from typing import Protocol, final, runtime_checkable

import torch

from symmerge.errors import SymmergeError
from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.store import Store, Usage, compute

Say = Callable[[str], None]
# Sums depend on the number of threads: one per worker, so that results do not depend on the
# machine. The last two are set by the command line, too.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
PATIENCE = 1.0  # seconds between checks that workers are alive


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt at a cell ended.

    `problem` is one line, `details` go to the log; `again`: another attempt may succeed.
    """

    cell: Cell
    problem: str = ""
    details: str = ""
    again: bool = True
    usage: Usage | None = None


@runtime_checkable
class Engine(Protocol):
    """Computes up to `workers` cells at once, up to `heavy` of them heavy.

    Between `open` and `close`: `start` a cell, `wait` for attempts that ended (perhaps none yet).
    """

    @property
    def workers(self) -> int: ...
    @property
    def heavy(self) -> int: ...
    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None: ...
    def start(self, cell: Cell) -> None: ...
    def wait(self) -> list[AttemptResult]: ...
    def close(self) -> None: ...


def attempt(cell: Cell, store: Store, say: Say) -> AttemptResult:
    """Compute a cell in a worker process, and report how that ended."""
    try:
        torch.set_num_threads(1)
        return AttemptResult(cell, usage=compute(cell, store, say))
    except (Exception, SystemExit) as error:
        line, details = " ".join(str(error).split()), traceback.format_exc()
        if isinstance(error, SymmergeError):  # the same input gives the same error
            return AttemptResult(cell, line, details, again=False)
        return AttemptResult(cell, f"{type(error).__name__}: {line}", details)


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    cell: Cell | None = None
    kinds: list[object] = field(default_factory=list)  # kinds of cells it has computed


@final
class LocalEngine:
    """Worker processes on this machine; they live as long as the run and import torch once."""

    def __init__(self, workers: int = 1, heavy: int | None = None) -> None:
        self.workers, self.heavy = workers, heavy or workers
        self._all: list[_Worker] = []

    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None:
        self._store, self._say = store, say

    def start(self, cell: Cell) -> None:
        alive = [worker for worker in self._all if worker.process.is_alive()]
        idle = [worker for worker in alive if worker.cell is None] or [self._new_worker()]
        kind = _kind(cell)
        worker = max(idle, key=lambda worker: (kind in worker.kinds, -len(worker.kinds)))
        worker.cell = cell
        if kind not in worker.kinds:
            worker.kinds.append(kind)
        with suppress(OSError):  # it died just now: `wait` will report it
            worker.pipe.send(cell)

    def wait(self) -> list[AttemptResult]:
        busy = [worker for worker in self._all if worker.cell is not None]
        connection.wait([worker.pipe for worker in busy], PATIENCE)
        return [result for worker in busy for result in self._receive(worker)]

    def close(self) -> None:
        for worker in self._all:
            worker.process.kill()
        for worker in self._all:
            worker.process.join()
            worker.pipe.close()
        self._all.clear()

    def _new_worker(self) -> _Worker:
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_work, args=(theirs, self._store))
        with _worker_environment():
            process.start()
        theirs.close()
        self._all.append(_Worker(process, ours))
        return self._all[-1]

    def _receive(self, worker: _Worker) -> Iterator[AttemptResult]:
        """Forward a worker's messages; yield its result, or a failure if it died."""
        # Read first: the last messages of a dead worker are still in the pipe.
        alive, cell = worker.process.is_alive(), worker.cell
        assert cell is not None
        try:
            while worker.pipe.poll():
                message = worker.pipe.recv()
                if isinstance(message, AttemptResult):
                    worker.cell = None
                    yield message
                    return
                self._say(cell, message)
        except (EOFError, OSError):
            alive = False
        if not alive:
            worker.process.join(PATIENCE)
            worker.process.kill()
            self._all.remove(worker)
            worker.pipe.close()
            yield AttemptResult(cell, f"the worker died ({_cause(worker.process.exitcode)})")


def _kind(cell: Cell) -> tuple[object, ...]:
    """Cells of one kind share loaded data and compiled GPU code, so one worker takes them all."""
    return cell.step, cell.settings.get("recipe"), cell.settings.get("config")


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        why = ": perhaps there was too little memory" if code == -signal.SIGKILL else ""
        return f"{signal.Signals(-code).name}{why}"
    return f"exit code {code}"


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C: a second one must not disturb the clean-up after the first.

    A signal mask would not do: other threads receive the signal, too.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one receives it
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _worker_environment() -> Iterator[None]:
    """Environment of a new worker: variables, and Ctrl-C blocked (the run ends its workers)."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    ensure_running()  # started with the first worker, the tracker would unblock Ctrl-C
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _work(pipe: Connection, store: Store) -> None:
    """Main loop of a local worker: one cell after the other, until the run ends or dies."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        pipe.send(attempt(pipe.recv(), store, pipe.send))


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
