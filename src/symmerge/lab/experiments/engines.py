"""Where cells are computed: what an engine is, and the one of this machine's processes. A worker that dies takes nothing else with it."""

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
from typing import Any, Protocol, final, runtime_checkable

import torch

from symmerge.errors import SymmergeError
from symmerge.lab.experiments.cells import Cell
from symmerge.lab.experiments.store import Store, Usage, compute

Say = Callable[[str], None]
# Sums depend on how many threads add them up: one each, so that results do not depend on the machine. The others are those of the command line.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
PATIENCE = 1.0  # seconds between looks at whether workers live


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt at a cell ended. `problem` in one line, `details` for the log; `again`: another attempt may end better."""

    cell: Cell
    problem: str = ""
    details: str = ""
    again: bool = True
    taken: Usage | None = None


@runtime_checkable
class Engine(Protocol):
    """Computes cells, so many at once, and of heavy ones no more than `heavy`. Between `open` and `close`: `start` one, `wait` for those that ended (perhaps none yet)."""

    @property
    def workers(self) -> int: ...
    @property
    def heavy(self) -> int: ...
    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None: ...
    def start(self, cell: Cell) -> None: ...
    def wait(self) -> list[AttemptResult]: ...
    def close(self) -> None: ...


def attempt(cell: Cell, store: Store, say: Say) -> AttemptResult:
    """Compute a cell and say how that ended, in a process made for it."""
    try:
        torch.set_num_threads(1)
        return AttemptResult(cell, taken=compute(cell, store, say))
    except SymmergeError as error:  # the same input gives the same error
        return AttemptResult(
            cell, " ".join(str(error).split()), traceback.format_exc(), again=False
        )
    except (Exception, SystemExit) as error:
        return AttemptResult(
            cell, f"{type(error).__name__}: {' '.join(str(error).split())}", traceback.format_exc()
        )


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    cell: Cell | None = None
    knows: list[Any] = field(default_factory=list)


@final
class LocalEngine:
    """Processes of this machine that live as long as the run: loading torch once each is enough."""

    def __init__(self, workers: int = 1, heavy: int | None = None) -> None:
        self.workers, self.heavy = workers, heavy or workers
        self._all: list[_Worker] = []

    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None:
        self._store, self._say = store, say

    def start(self, cell: Cell) -> None:
        idle = [
            worker for worker in self._all if worker.cell is None and worker.process.is_alive()
        ] or [self._hired()]
        kind = _kind(cell)
        chosen = max(idle, key=lambda worker: (kind in worker.knows, -len(worker.knows)))
        chosen.cell = cell
        if kind not in chosen.knows:
            chosen.knows.append(kind)
        with suppress(OSError):  # it died just now: `wait` will say so
            chosen.pipe.send(cell)

    def wait(self) -> list[AttemptResult]:
        busy = [worker for worker in self._all if worker.cell is not None]
        connection.wait([worker.pipe for worker in busy], PATIENCE)
        return [ended for worker in busy for ended in self._heard(worker)]

    def close(self) -> None:
        for worker in self._all:
            worker.process.kill()
        for worker in self._all:
            worker.process.join()
            worker.pipe.close()
        self._all.clear()

    def _hired(self) -> _Worker:
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_work, args=(theirs, self._store))
        with _as_workers_start():
            process.start()
        theirs.close()
        self._all.append(_Worker(process, ours))
        return self._all[-1]

    def _heard(self, worker: _Worker) -> Iterator[AttemptResult]:
        """What a worker has said since; its death, if it died."""
        cell, alive = (
            worker.cell,
            worker.process.is_alive(),
        )  # asked first: the last words of one that dies are still in the pipe
        assert cell is not None
        try:
            while worker.pipe.poll():
                said = worker.pipe.recv()
                if isinstance(said, AttemptResult):
                    worker.cell = None
                    yield said
                    return
                self._say(cell, said)
        except (EOFError, OSError):
            alive = False
        if not alive:
            worker.process.join(PATIENCE)
            worker.process.kill()
            self._all.remove(worker)
            worker.pipe.close()
            yield AttemptResult(cell, f"the worker died ({_way_of_death(worker.process.exitcode)})")


def _kind(cell: Cell) -> tuple[Any, ...]:
    """A worker that computed a cell of a kind has most of what another of it needs: data, on a GPU what was compiled."""
    return cell.step, cell.settings.get("recipe"), cell.settings.get("config")


def _way_of_death(code: int | None) -> str:
    if code is not None and code < 0:
        why = ": perhaps there was too little memory" if code == -signal.SIGKILL else ""
        return f"{signal.Signals(-code).name}{why}"
    return f"exit code {code}"


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Ctrl-C waits: a second one must not keep the first from ending what it should end. (A mask would not do: other threads hear it, too.)"""
    if threading.current_thread() is not threading.main_thread():  # it is only heard there
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _as_workers_start() -> Iterator[None]:
    """A new process inherits the environment and which signals are held back: Ctrl-C is for the run, which ends its workers itself."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    ensure_running()  # now: begun together with the first worker, it would let Ctrl-C through again
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _work(pipe: Connection, store: Store) -> None:
    """The life of a local worker: one cell after the other, until the run ends or dies."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        pipe.send(attempt(pipe.recv(), store, pipe.send))


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
