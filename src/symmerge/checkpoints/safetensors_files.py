"""Safetensors files: headers are read and checked at once, tensors on demand."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from symmerge.checkpoints.weights import Shape, StoredWeights, buffer
from symmerge.errors import CheckpointError, shown

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Parsed only so that errors can name them.
OTHER_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
LARGE = 1 << 20  # bytes: smaller tensors are read as fast
COPY_AGAIN = "download or copy it again"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is stored: file, dtype, shape, and byte offset."""

    path: Path
    dtype: torch.dtype
    shape: Shape
    start: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True, repr=False)
class FileWeights(StoredWeights):
    """Tensors of safetensors files.

    Large ones are mapped into memory, each by itself: a map of the whole file would count every
    page ever touched as memory in use.
    """

    entries: Mapping[str, TensorEntry]

    def names(self) -> list[str]:
        return list(self.entries)

    def shape(self, name: str) -> Shape:
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].dtype

    def raw(self, name: str) -> Tensor:
        entry = self.entries[name]
        mapped = _mapped(entry) if entry.bytes >= LARGE else None
        return _read(name, entry) if mapped is None else mapped

    def select(self, stored_as: Mapping[str, str]) -> StoredWeights:
        return FileWeights({name: self.entries[stored] for name, stored in stored_as.items()})


def _read(name: str, entry: TensorEntry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    unread = buffer(tensor)
    with open(entry.path, "rb", buffering=0) as file:
        file.seek(entry.start)
        while len(unread):
            count = file.readinto(unread)
            if not count:
                raise CheckpointError(
                    f"{entry.path} ends inside {name}: the file is truncated; {COPY_AGAIN}"
                )
            unread = unread[count:]
    return tensor


def _mapped(entry: TensorEntry) -> Tensor | None:
    """The tensor as a private map: changes stay in memory. None where it must be read."""
    if entry.start % entry.dtype.itemsize:
        return None  # torch crashes on some operations with numbers that are not aligned
    try:
        # All bytes before it, too, but only what is touched takes memory.
        storage = torch.UntypedStorage.from_file(
            str(entry.path), shared=False, nbytes=entry.start + entry.bytes
        )
    except RuntimeError:  # no memory to promise, a file system without maps, a shorter file
        return None
    return torch.empty(0, dtype=entry.dtype).set_(  # pyright: ignore[reportCallIssue]
        storage, entry.start // entry.dtype.itemsize, entry.shape
    )


@dataclass(frozen=True, order=True)
class _Item:
    """One entry of a header, as it is written there."""

    start: int
    end: int
    name: str
    code: str
    shape: Shape


LARGEST_HEADER = 100_000_000  # the limit of safetensors itself
HEADER_ERRORS = (
    *(ValueError, KeyError, TypeError, AttributeError, AssertionError),
    *(OverflowError, RecursionError, RuntimeError),  # infinite, deep or huge
)


def read_header(path: Path) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors of one file, from its header alone; its length is checked against the header."""
    header_size, length, items = _parsed_header(path)
    expected = 0
    for item in items:
        yield (
            item.name,
            TensorEntry(
                path, _checked_dtype(path, item, expected), item.shape, 8 + header_size + item.start
            ),
        )
        expected = item.end
    promised = 8 + header_size + expected
    if promised != length:
        raise _corrupt(path, f"{length} bytes, but the header promises {promised}")


def _parsed_header(path: Path) -> tuple[int, int, list[_Item]]:
    """Size of the header, length of the file, and the items in the order of their bytes."""
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if size > LARGEST_HEADER:
                raise _corrupt(path, f"its header has {size} bytes, {LARGEST_HEADER} at most")
            if not 2 <= size <= length - 8:
                raise _corrupt(path, f"its header is cut short ({length} bytes in all)")
            header = json.loads(file.read(size))
        metadata = header.pop("__metadata__", None)
        assert metadata is None or isinstance(metadata, dict)
        return size, length, sorted(_item(name, content) for name, content in header.items())
    except HEADER_ERRORS as error:
        reason = " ".join(str(error).split())[:120]
        raise _corrupt(path, f"its header does not parse ({reason})") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _item(name: str, content: Mapping[str, object]) -> _Item:
    start, end = _counts(content["data_offsets"])
    shape = tuple(_counts(content["shape"]))
    return _Item(start, end, name, str(content["dtype"]), shape)


def _counts(numbers: object) -> list[int]:
    if isinstance(numbers, list) and all(type(one) is int and one >= 0 for one in numbers):
        return numbers
    raise ValueError(f"{shown(numbers)} where whole numbers should be")


def _checked_dtype(path: Path, item: _Item, expected_start: int) -> torch.dtype:
    dtype = DTYPES.get(item.code) or OTHER_DTYPES.get(item.code)
    if dtype is None:
        raise CheckpointError(
            f"{path}: {item.name} has the unknown precision {shown(item.code)}:"
            f" use the float16 or float32 checkpoint, or {COPY_AGAIN}"
        )
    size = math.prod(item.shape) * dtype.itemsize  # torch's own sizes overflow
    if item.start != expected_start or item.end - item.start != size:
        raise _corrupt(
            path,
            f"{item.name} lies at bytes {item.start} to {item.end},"
            f" which does not fit its shape {list(item.shape)}",
        )
    return dtype


def _corrupt(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a complete safetensors file: {reason}; {COPY_AGAIN}")
