"""Write Hugging Face checkpoints tensor by tensor, in shards; the model is never in memory as a whole."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symmerge.checkpoints.files import write_json
from symmerge.checkpoints.reading import DTYPES
from symmerge.checkpoints.weights import Weights, buffer
from symmerge.errors import CheckpointError

CODES = {dtype: code for code, dtype in DTYPES.items()}
DEFAULT_SHARD = 5 * 10**9
M_MMAP_THRESHOLD, LARGE_TENSOR = -3, 1 << 20


def return_freed_memory() -> None:
    """Give large tensors mappings of their own, so that freed ones go back to the system. For processes that stream a checkpoint and end.

    In glibc's heap the holes that aligned tensors leave are often too small for the next ones: streaming 2 GB filled 1.7 GB.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_MMAP_THRESHOLD, LARGE_TENSOR)


@dataclass(frozen=True)
class Shard:
    """One file to be written: its name, its header, and the tensors in it."""

    file: str
    header: bytes
    names: tuple[str, ...]


def plan_shards(weights: Weights, stored_as: Mapping[str, str], max_bytes: int) -> list[Shard]:
    """Divide the tensors over files of at most `max_bytes` (a larger tensor gets a file of its own)."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in weights.names():
        needed = _bytes(weights, name)
        if groups[-1] and filled + needed > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += needed
    count = len(groups)
    files = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    return [
        Shard(file, _header(weights, names, stored_as), tuple(names))
        for file, names in zip(files, groups, strict=True)
    ]


def _header(weights: Weights, names: list[str], stored_as: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        dtype, shape = weights.dtype(name), weights.shape(name)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        header[stored_as.get(name, name)] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_weights(
    folder: Path,
    weights: Weights,
    *,
    stored_as: Mapping[str, str] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write tensors as the hub names them, each while the next ones are computed."""
    stored_as = stored_as or {}
    shards = plan_shards(weights, stored_as, max_shard_bytes)
    order = [name for shard in shards for name in shard.names]
    with closing(_computed(weights, order)) as tensors:
        for shard in shards:
            with open(folder / shard.file, "wb", buffering=0) as file:
                file.write(shard.header)
                for name in shard.names:
                    _write_all(file, next(tensors))
                    if progress:
                        progress(name)
    if len(shards) > 1:
        total = sum(_bytes(weights, name) for name in order)
        weight_map = {
            stored_as.get(name, name): shard.file for shard in shards for name in shard.names
        }
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )


def _computed(weights: Weights, order: list[str]) -> Generator[Tensor]:
    """The tensors in this order, as they are stored. Two threads, so that one reads and hashes while the other multiplies."""
    most = max(
        (_bytes(weights, name) for name in order), default=0
    )  # so much is under way at a time: the largest comes alone
    pending: deque[tuple[str, Future[Tensor]]] = deque()
    held, at = 0, 0
    pool = ThreadPoolExecutor(2)
    try:
        while pending or at < len(order):
            while at < len(order) and held + _bytes(weights, order[at]) <= most:
                pending.append((order[at], pool.submit(_stored, weights, order[at])))
                held, at = held + _bytes(weights, order[at]), at + 1
            name, tensor = pending.popleft()
            yield tensor.result()
            held -= _bytes(weights, name)
            del tensor
    finally:  # after an error or an interrupt, what has not begun does not begin
        pool.shutdown(cancel_futures=True)


def _stored(weights: Weights, name: str) -> Tensor:
    tensor = weights[name].to(weights.dtype(name)).contiguous()
    if (
        tensor.dtype == torch.float16
        and tensor.numel()
        and not all(bound.isfinite() for bound in torch.aminmax(tensor))
    ):
        raise CheckpointError(
            f"{name} has entries above 65504, too large for float16: convert the source to bfloat16 or float32 first"
        )
    return tensor


def _bytes(weights: Weights, name: str) -> int:
    return torch.Size(weights.shape(name)).numel() * weights.dtype(name).itemsize


def _write_all(file, tensor: Tensor) -> None:
    left = buffer(tensor)
    while len(left):
        left = left[file.write(left[: 1 << 30]) :]
