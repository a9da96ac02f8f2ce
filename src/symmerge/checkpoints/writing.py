"""Write Hugging Face checkpoints in shards, tensor by tensor; never a whole model in memory."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import torch
from torch import Tensor

from symmerge.checkpoints.files import write_json
from symmerge.checkpoints.memory import workers
from symmerge.checkpoints.safetensors_files import DTYPES
from symmerge.checkpoints.weights import Weights, buffer, is_finite, stored_bytes
from symmerge.errors import CheckpointError
from symmerge.symmetry.groups.linalg import threads_like_this

CODES = {dtype: code for code, dtype in DTYPES.items()}
DEFAULT_SHARD = 5 * 10**9


@dataclass(frozen=True)
class Shard:
    """One file to be written: its name, its header, and the tensors in it."""

    file: str
    header: bytes
    names: tuple[str, ...]


def write_weights(
    folder: Path,
    weights: Weights,
    *,
    stored_as: Mapping[str, str] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write shards with the hub's file names; each tensor while the next are computed."""
    stored_as = stored_as or {}
    shards = _plan_shards(weights, stored_as, max_shard_bytes)
    names = [name for shard in shards for name in shard.names]
    with closing(_compute(weights, names)) as tensors:
        for shard in shards:
            with open(folder / shard.file, "wb", buffering=0) as file:
                file.write(shard.header)
                for name in shard.names:
                    write_all(file, buffer(next(tensors)))
                    if progress:
                        progress(name)
    if len(shards) > 1:
        _write_index(folder, weights, shards, stored_as)


def _write_index(
    folder: Path, weights: Weights, shards: Sequence[Shard], stored_as: Mapping[str, str]
) -> None:
    files = {name: shard.file for shard in shards for name in shard.names}
    content = {
        "metadata": {"total_size": sum(stored_bytes(weights, name) for name in files)},
        "weight_map": {stored_as.get(name, name): file for name, file in files.items()},
    }
    write_json(folder / "model.safetensors.index.json", content)


def _plan_shards(weights: Weights, stored_as: Mapping[str, str], max_bytes: int) -> list[Shard]:
    """Divide tensors over files of at most `max_bytes`; a larger tensor gets its own file."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in weights.names():
        needed = stored_bytes(weights, name)
        if groups[-1] and filled + needed > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += needed
    count = len(groups)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [
        Shard(file, _header(weights, names, stored_as), tuple(names))
        for file, names in zip(files if count > 1 else ["model.safetensors"], groups, strict=True)
    ]


def _header(weights: Weights, names: list[str], stored_as: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        end = start + stored_bytes(weights, name)
        header[stored_as.get(name, name)] = {
            "dtype": CODES[weights.dtype(name)],
            "shape": list(weights.shape(name)),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _compute(weights: Weights, names: list[str]) -> Generator[Tensor]:
    """Yield the tensors in this order. Two threads: one reads and hashes, the other multiplies.

    Together they hold no more bytes than the largest tensor, which is therefore computed alone.
    With more processors there are more threads, and as much more room.
    """
    sizes, threads = {name: stored_bytes(weights, name) for name in names}, workers()
    limit = max(sizes.values(), default=0) * threads // 2
    pending: deque[tuple[str, Future[Tensor]]] = deque()
    held, position = 0, 0
    pool = threads_like_this(threads)
    try:
        while pending or position < len(names):
            while position < len(names) and held + sizes[names[position]] <= limit:
                name = names[position]
                pending.append((name, pool.submit(_in_stored_precision, weights, name)))
                held, position = held + sizes[name], position + 1
            name, tensor = pending.popleft()
            yield tensor.result()
            held -= sizes[name]
            del tensor
    finally:  # after an error or an interrupt, cancel what has not started
        pool.shutdown(cancel_futures=True)


def _in_stored_precision(weights: Weights, name: str) -> Tensor:
    tensor = weights[name].to(weights.dtype(name)).contiguous()
    if tensor.dtype == torch.float16 and not is_finite(tensor):
        raise CheckpointError(
            f"{name} has entries above 65504, too large for float16:"
            " store it as bfloat16 or float32 (--dtype), or convert the source first"
        )
    return tensor


def write_all(file: RawIOBase, content: memoryview) -> None:
    """Write bytes to an unbuffered file: one call writes at most 2 GB."""
    while len(content):
        content = content[file.write(content[: 1 << 30]) :]
