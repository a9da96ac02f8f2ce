"""Finished cells on disk: one folder per key, complete or absent."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from symmerge.checkpoints.files import read_json, replacing, write_json
from symmerge.errors import CheckpointError, MismatchError
from symmerge.lab.experiments.cells import Cell, Result

RESULT = "result.json"
LATE = 30.0
"""Seconds until other machines see a new folder: network file systems cache listings."""


@dataclass(frozen=True)
class Usage:
    """Time, memory and host of a computed cell. Never part of a result."""

    key: str
    label: str
    seconds: float
    peak_gigabytes: float
    host: str
    process: int


@dataclass(frozen=True)
class Store:
    """`root/cells/KEY/`: result.json, cell.json and the step's files; `root/times.jsonl`: usage."""

    root: Path

    @property
    def cells(self) -> Path:
        return self.root / "cells"

    def folder(self, cell: Cell) -> Path:
        return self.cells / cell.key

    def done(self, cell: Cell) -> bool:
        return (self.folder(cell) / RESULT).is_file()

    def result(self, cell: Cell) -> Result:
        return read_json(self.folder(cell) / RESULT)

    def appears(self, cell: Cell) -> bool:
        """Whether a cell that was finished elsewhere becomes visible here."""
        until = time.monotonic() + LATE
        while not self.done(cell):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def sweep(self, key: str = "") -> None:
        """Remove leftovers of killed runs, of one cell or of all."""
        for left in self.cells.glob(f".{key}*.partial"):
            with suppress(OSError):
                # Rename first: a worker presumed dead must not move a partial folder into place.
                shutil.rmtree(left.rename(left.with_suffix(".stale")), ignore_errors=True)
        for stale in self.cells.glob(f".{key}*.stale"):
            shutil.rmtree(stale, ignore_errors=True)

    def record(self, usage: Usage) -> None:
        with open(self.root / "times.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(usage)) + "\n")

    def log(self, cell: Cell, text: str) -> None:
        """Append the details of a failure to failures.log."""
        with open(self.root / "failures.log", "a", encoding="utf-8") as file:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"{now} {cell.key} {cell.label}\n{text.rstrip()}\n\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Allow one run at a time, and remove leftovers of earlier ones."""
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
            file = open(self.root / ".lock", "w")  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {self.root}: {error.strerror}; choose another folder"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise MismatchError(
                    f"another run is using {self.root}: wait for it, or choose another folder"
                ) from error
            except OSError:  # the file system has no locks: continue without
                pass
            self.sweep()
            yield


def compute(cell: Cell, store: Store, say: Callable[[str], None]) -> Usage | None:
    """Run a cell's step in a temporary folder, then move it into place; None if it existed."""
    if store.done(cell):
        return None
    _check_visible(cell, store)
    store.sweep(cell.key)
    usage = None
    try:
        with replacing(store.folder(cell)) as folder:
            folder.mkdir()
            _reset_peak()
            start = time.perf_counter()
            result = cell.work([store.folder(need) for need in cell.needs], folder, say)
            seconds, host = time.perf_counter() - start, socket.gethostname()
            usage = Usage(cell.key, cell.label, seconds, _peak(), host, os.getpid())
            write_json(folder / "cell.json", _described(cell))
            write_json(folder / RESULT, result)
    except OSError:
        if usage is None:  # the step failed; otherwise another worker was faster
            raise
    if not store.done(cell):
        raise CheckpointError(
            f"{store.folder(cell)} could not be written:  did someone else change {store.cells}?"
        )
    return usage


def _check_visible(cell: Cell, store: Store) -> None:
    """Check that this machine sees the store, and the cells that this one needs."""
    hidden = [] if store.cells.is_dir() else [store.cells]
    hidden += [store.folder(need) for need in cell.needs if hidden or not store.appears(need)]
    if hidden:
        raise MismatchError(
            f"{socket.gethostname()} does not see {hidden[0]}:"
            " all machines must share the file system of the cells; choose another --out"
        )


def _described(cell: Cell) -> dict[str, object]:
    return {
        "step": cell.step,
        "settings": cell.settings,
        "label": cell.label,
        "needs": [need.key for need in cell.needs],
    }


def _reset_peak() -> None:
    """Reset the peak memory: a worker computes many cells."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> float:
    """Peak memory so far, in GB."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
