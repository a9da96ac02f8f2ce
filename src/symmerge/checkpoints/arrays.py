"""NumPy files: no pickles, and headers that are checked before memory is taken for an array."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Sequence
from io import BufferedIOBase
from lzma import LZMAError
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from symmerge.checkpoints.limits import LARGEST_EXPANSION, plain_size
from symmerge.errors import DataError

Stream = IO[bytes] | BufferedIOBase
Arrays = tuple[np.ndarray, ...]
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
KINDS = "biuf"  # bool, whole numbers, floats
DAMAGES = (  # of zip files and headers, as Python's libraries raise them
    *(OSError, ValueError, EOFError, KeyError, TypeError, OverflowError, MemoryError),
    *(RecursionError, SyntaxError, NotImplementedError, RuntimeError, UnicodeError),
    *(zipfile.BadZipFile, zlib.error, LZMAError, TokenError),
)


class _Refused(Exception):
    """What is wrong with an array."""


def read_npz(path: str | Path, choices: Sequence[tuple[str, ...]]) -> Arrays | list[str]:
    """The arrays of the first choice whose names are all there; all names if none is.

    FileNotFoundError is the caller's: it knows what may be given instead.
    """
    try:
        size = plain_size(path)
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            for names in choices:
                if members.keys() >= set(names):
                    return tuple(_member(archive, members[name], size) for name in names)
        return list(members)
    except FileNotFoundError:
        raise
    except (_Refused, *DAMAGES) as error:
        raise DataError(
            f"{path} is not an .npz file that can be read without running code ({_short(error)}):"
            " write it with numpy.savez"
        ) from error


def read_npy(path: str | Path, what: str) -> np.ndarray:
    """The array of an .npy file."""
    try:
        size = plain_size(path)
        with open(path, "rb") as file:
            return _array(file, size, what)
    except (_Refused, *DAMAGES) as error:
        raise DataError(
            f"{path} is not an .npy file of {what} ({_short(error)}): save one with numpy.save"
        ) from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, size: int) -> np.ndarray:
    if info.flag_bits & 1:
        raise _Refused(f"{info.filename} is encrypted")
    if info.file_size > size + LARGEST_EXPANSION:
        raise _Refused(
            f"{info.filename} unpacks to {info.file_size:,} bytes,"
            f" {LARGEST_EXPANSION:,} more than the file at most"
        )
    with archive.open(info) as file:
        return _array(file, info.file_size, info.filename)


def _array(file: Stream, size: int, what: str) -> np.ndarray:
    """An array whose header promises just what is there; `size` counts the header, too."""
    shape, fortran, dtype = _header(file, what)
    promised = math.prod(shape) * dtype.itemsize
    if file.tell() + promised != size:
        raise _Refused(f"{what} has {size:,} bytes, its header promises {file.tell() + promised:,}")
    array = np.empty(shape, dtype, order="F" if fortran else "C")
    _fill(file, array.T if fortran else array, what)
    return array


def _header(file: Stream, what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version not in HEADERS:
        raise _Refused(f"{what} has version {version} of the format")
    shape, fortran, dtype = HEADERS[version](file)
    if dtype.kind not in KINDS or any(type(side) is not int or side < 0 for side in shape):
        raise _Refused(f"{what} holds {str(dtype)[:40]} of shape {str(list(shape))[:40]}")
    return shape, fortran, dtype


def _fill(file: Stream, array: np.ndarray, what: str) -> None:
    """Read straight into the array: one copy in memory, not two."""
    unread = array.reshape(-1).view(np.uint8).data
    while len(unread):
        count = file.readinto(unread[: 1 << 24])  # type: ignore[attr-defined]
        if not count:
            raise _Refused(f"{what} ends early")
        unread = unread[count:]


def _short(error: BaseException) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
    return text if len(text) <= 160 else f"{text[:157]}..."
