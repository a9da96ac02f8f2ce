"""Tensors that are computed once: they stay in memory as far as there is room, else in a file."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import final

import numpy as np
import torch
from torch import Tensor

from symmerge.checkpoints.memory import free_memory
from symmerge.checkpoints.weights import Weights, WeightsOver, buffer, fitting, working
from symmerge.checkpoints.writing import write_all

ROOM = 0.2  # of the free memory
SPARE = 0.5  # of the free disk


@final
class Scratch:
    """A file without a name, gone with its process, from which tensors are mapped."""

    def __init__(self, folder: Path, most: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._end, self._most, self._lock = 0, most, Lock()

    def stored(self, tensor: Tensor) -> Tensor | None:
        """The tensor, mapped from the file; None if it does not fit."""
        content = buffer(tensor.contiguous())
        with self._lock:
            start = self._end
            if not len(content) or start + len(content) > self._most:
                return None
            try:
                self._file.seek(start)
                write_all(self._file, content)
            except OSError:  # the disk is full
                return None
            self._end = start + len(content)
            mapped = np.memmap(self._file, np.uint8, "c", offset=start, shape=len(content))
        return torch.from_numpy(mapped).view(tensor.dtype).view(tensor.shape)


@final
class ComputedOnce(WeightsOver):
    """Another collection whose tensors are computed once.

    The first, up to `room` bytes, stay in memory; the others in a scratch file. Without one they
    are computed each time: readers that pass over everything several times would find nothing in a
    cache that drops what was used longest ago. Threads that ask for one tensor at once share it.
    """

    def __init__(self, base: Weights, room: int, scratch: Scratch | None = None) -> None:
        self.base, self._scratch, self._lock = base, scratch, Lock()
        self._stays = frozenset(fitting(base, room))
        self._tensors: dict[str, Future[Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:
            tensor, is_first = self._tensors.get(name), name not in self._tensors
            if tensor is None:
                tensor = self._tensors[name] = Future()
        if is_first:
            self._compute(name, tensor)
        return tensor.result()

    def _compute(self, name: str, result: Future[Tensor]) -> None:
        stays = name in self._stays
        try:
            tensor = self.base[name]
            stored = self._scratch.stored(tensor) if self._scratch and not stays else None
            stays = stays or stored is not None
            result.set_result(tensor if stored is None else stored)
        except BaseException as error:  # Ctrl-C, too: others wait
            result.set_exception(error)
            stays = False
        if not stays:
            with self._lock:
                del self._tensors[name]


def computed_once(weights: Weights, folder: Path | None, share: float = 1.0) -> ComputedOnce:
    """The weights, each computed once: in this share of the room there is, then in the folder."""
    room = int(share * ROOM * free_memory(torch.device("cpu")))
    scratch = _scratch(folder, share) if folder and _held(weights) > room else None
    return ComputedOnce(weights, room, scratch)


def _scratch(folder: Path, share: float) -> Scratch | None:
    try:
        return Scratch(folder, int(share * SPARE * shutil.disk_usage(folder).free))
    except OSError:  # nobody may write there: the command says so when it writes its result
        return None


def _held(weights: Weights) -> int:
    """Bytes of all tensors in the precision they are computed in."""
    return sum(
        torch.Size(weights.shape(name)).numel() * working(weights.dtype(name)).itemsize
        for name in weights
    )
