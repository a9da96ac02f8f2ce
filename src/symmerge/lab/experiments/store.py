"""Where finished cells lie: one folder each, under its key, that appears whole or not at all."""

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
from typing import Any

from symmerge.checkpoints.files import read_json, replacing, write_json
from symmerge.errors import CheckpointError, MismatchError
from symmerge.lab.experiments.cells import Cell, Result

RESULT = "result.json"
LATE = 30.0
"""Seconds after which another machine sees what one has written, even on a network file system that remembers old listings."""


@dataclass(frozen=True)
class Usage:
    """What a cell took, and where. Never part of a result."""

    key: str
    label: str
    seconds: float
    peak_gigabytes: float
    host: str
    process: int


@dataclass(frozen=True)
class Store:
    """`root/cells/KEY/` has `result.json`, `cell.json` and the files of the step; `root/times.jsonl` what cells took."""

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
        """Whether a cell that was finished elsewhere is to be seen here."""
        until = time.monotonic() + LATE
        while not self.done(cell):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def sweep(self, key: str = "") -> None:
        """Clear what killed runs left, of one cell or of all."""
        for left in self.cells.glob(f".{key}*.partial"):
            with suppress(OSError):
                # Renamed first: whoever still writes there, presumed dead, cannot rename a half-cleared folder into place.
                shutil.rmtree(left.rename(left.with_suffix(".stale")), ignore_errors=True)
        for stale in self.cells.glob(f".{key}*.stale"):
            shutil.rmtree(stale, ignore_errors=True)

    def record(self, taken: Usage) -> None:
        with open(self.root / "times.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(taken)) + "\n")

    def log(self, cell: Cell, text: str) -> None:
        """Keep all that is known about a failure, for whoever looks for its cause."""
        with open(self.root / "failures.log", "a", encoding="utf-8") as file:
            file.write(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} {cell.key} {cell.label}\n{text.rstrip()}\n\n"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time, and nothing left from earlier ones."""
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
                    f"another run is at work in {self.root}: wait for it, or choose another folder"
                ) from error
            except OSError:  # a file system without locks: go on
                pass
            self.sweep()
            yield


def compute(cell: Cell, store: Store, say: Callable[[str], None]) -> Usage | None:
    """Run the step of a cell beside its place and move it there. Nothing is done where the cell is finished already."""
    if store.done(cell):
        return None
    host = socket.gethostname()
    for seen, what in [
        (store.cells.is_dir(), store.cells),
        *((store.appears(need), store.folder(need)) for need in cell.needs),
    ]:
        if not seen:
            raise MismatchError(
                f"{host} does not see {what}: cells must lie on a file system that all machines share; choose another --out"
            )
    store.sweep(cell.key)
    taken = None
    try:
        with replacing(store.folder(cell)) as folder:
            folder.mkdir()
            _forget_peak()
            start = time.perf_counter()
            result = cell.work([store.folder(need) for need in cell.needs], folder, say)
            seconds = time.perf_counter() - start
            taken = Usage(cell.key, cell.label, seconds, _peak(), host, os.getpid())
            write_json(folder / "cell.json", _described(cell))
            write_json(folder / RESULT, result)
    except OSError:
        if taken is None:  # the work failed; after it, another worker was faster
            raise
    if not store.done(cell):
        raise CheckpointError(
            f"{store.folder(cell)} could not be written: was {store.cells} changed by someone else?"
        )
    return taken


def _described(cell: Cell) -> dict[str, Any]:
    return {
        "step": cell.step,
        "settings": cell.settings,
        "label": cell.label,
        "needs": [need.key for need in cell.needs],
    }


def _forget_peak() -> None:
    """A worker computes many cells: count the memory of this one."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> float:
    """The most memory so far, in GB."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
