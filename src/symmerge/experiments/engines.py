"""Where cells are computed: in processes of this machine, or on a Ray cluster. A worker that dies takes nothing else with it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, final, runtime_checkable

import torch

from symmerge.errors import MismatchError, SymmergeError
from symmerge.experiments.cells import Cell
from symmerge.experiments.store import Store, Taken, compute

Say = Callable[[str], None]
# Sums depend on how many threads add them up: one each, so that results do not depend on the machine. The others are those of the command line.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
PATIENCE = 1.0  # seconds between looks at whether workers live


@dataclass(frozen=True)
class Ended:
    """How an attempt at a cell ended. `problem` in one line, `details` for the log; `again`: another attempt may end better."""

    cell: Cell
    problem: str = ""
    details: str = ""
    again: bool = True
    taken: Taken | None = None


@runtime_checkable
class Engine(Protocol):
    """Computes cells, so many at once. Between `open` and `close`: `start` one, `wait` for those that ended (perhaps none yet)."""

    @property
    def workers(self) -> int: ...
    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None: ...
    def start(self, cell: Cell) -> None: ...
    def wait(self) -> list[Ended]: ...
    def close(self) -> None: ...


def attempt(cell: Cell, store: Store, say: Say) -> Ended:
    """Compute a cell and say how that ended, in a process made for it."""
    try:
        torch.set_num_threads(1)
        return Ended(cell, taken=compute(cell, store, say))
    except SymmergeError as error:  # the same input gives the same error
        return Ended(cell, " ".join(str(error).split()), traceback.format_exc(), again=False)
    except (Exception, SystemExit) as error:
        return Ended(cell, f"{type(error).__name__}: {' '.join(str(error).split())}", traceback.format_exc())


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    cell: Cell | None = None


@final
class LocalEngine:
    """Processes of this machine that live as long as the run: loading torch once each is enough."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._all: list[_Worker] = []

    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None:
        self._store, self._say = store, say

    def start(self, cell: Cell) -> None:
        idle = next((worker for worker in self._all if worker.cell is None and worker.process.is_alive()), None) or self._hired()
        idle.cell = cell
        with suppress(OSError):  # it died just now: `wait` will say so
            idle.pipe.send(cell)

    def wait(self) -> list[Ended]:
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

    def _heard(self, worker: _Worker) -> Iterator[Ended]:
        """What a worker has said since; its death, if it died."""
        cell, alive = worker.cell, worker.process.is_alive()  # asked first: the last words of one that dies are still in the pipe
        assert cell is not None
        try:
            while worker.pipe.poll():
                said = worker.pipe.recv()
                if isinstance(said, Ended):
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
            yield Ended(cell, f"the worker died ({_way_of_death(worker.process.exitcode)})")


def _way_of_death(code: int | None) -> str:
    if code is not None and code < 0:
        why = ": perhaps there was too little memory" if code == -signal.SIGKILL else ""
        return f"{signal.Signals(-code).name}{why}"
    return f"exit code {code}"


@contextmanager
def _as_workers_start() -> Iterator[None]:
    """A new process inherits the environment and which signals are held back: Ctrl-C is for the run, which ends its workers itself."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
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


@final
class RayEngine:
    """A Ray cluster at `address`, or one of this machine's own. The folder of the store must lie where every node sees it under the same path."""

    def __init__(self, address: str | None = None, workers: int = 2, *, gpus: float = 0.0) -> None:
        self.workers = workers
        self._address, self._gpus = address, gpus
        self._running: dict[Any, Cell] = {}

    def open(self, store: Store, say: Callable[[Cell, str], None]) -> None:
        self._ray, self._store = _ray(), store
        self._ours = not self._ray.is_initialized()
        if self._ours:
            where = {"address": self._address} if self._address else {"address": "local", "num_cpus": self.workers, "include_dashboard": False}
            try:
                _knock(self._address)
                self._ray.init(**where, log_to_driver=False, logging_level="ERROR")
            except (OSError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())
                raise MismatchError(f"no Ray cluster at {self._address or 'this machine'} ({reason}): start one with `ray start --head`") from error
        try:
            self._check_nodes()
        except BaseException:
            self.close()
            raise
        # A cluster has its own installation; on this machine workers find what this process finds.
        environment = ENVIRONMENT if self._address else {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # No retries of Ray's own: the run counts attempts.
        self._attempt = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=0, runtime_env={"env_vars": environment})(_attempt_there)

    def start(self, cell: Cell) -> None:
        self._running[self._attempt.remote(cell, self._store)] = cell

    def wait(self) -> list[Ended]:
        ready, _ = self._ray.wait(list(self._running), timeout=PATIENCE)
        return [self._ended(reference, self._running.pop(reference)) for reference in ready]

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._ours:
            self._ray.shutdown()

    def _ended(self, reference: Any, cell: Cell) -> Ended:
        try:
            ended = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # its process, its node or the way to it
            return Ended(cell, f"the worker died ({str(error).strip().splitlines()[0]})", str(error))
        if not ended.problem and not self._store.appears(cell):
            return Ended(cell, f"{self._store.folder(cell)} was finished elsewhere and is not to be seen here: share this folder with all nodes", again=False)
        return ended

    def _check_nodes(self) -> None:
        """That there are GPUs where they are asked for, and that every node sees the folder; one that joins later finds out with its first cell."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On  # type: ignore[import-not-found]

        if self._gpus and not self._ray.cluster_resources().get("GPU"):
            raise MismatchError("no node of the Ray cluster has a GPU, and cells would wait for one for ever: use --device cpu, or add one")
        look = self._ray.remote(num_cpus=0, max_retries=3)(_sees)
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        seen = self._ray.get([look.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote(self._store) for node in nodes])
        if blind := [node["NodeManagerHostname"] for node, sees in zip(nodes, seen, strict=True) if not sees]:
            raise MismatchError(f"{', '.join(blind)} of the cluster cannot see {self._store.root}: choose a folder that all nodes share under the same path")


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError as error:
        raise MismatchError("Ray is not installed: pip install 'symmerge[ray]', or use --engine local") from error
    return ray


def _knock(address: str | None) -> None:
    """Ray takes minutes to find out that nobody is there."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()


def _attempt_there(cell: Cell, store: Store) -> Ended:
    return attempt(cell, store, print)  # Ray keeps what workers print in its logs


def _sees(store: Store) -> bool:
    return store.cells.is_dir()
