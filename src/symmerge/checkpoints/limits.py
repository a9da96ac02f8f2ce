"""What a file that a user names may cost: only plain files are read, and none without a limit.

A compressed file of a kilobyte can unpack to gigabytes, and a pipe or a device never ends. Limits
are checked before memory is taken, or while it is.
"""

from __future__ import annotations

import errno
import lzma
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LARGEST_TEXT = 100_000_000  # bytes of a text or table, plain or unpacked
LARGEST_TABLE = 1_000_000  # rows: an object of Python takes a hundred times what a comma does
LARGEST_ROW = 1_000_000  # characters
LARGEST_EXPANSION = 256_000_000  # bytes that an .npz may unpack to beyond its own size
LARGEST_PICTURE = 32_000_000  # pixels: 14 bytes each while it is decoded
LONGEST_PICTURE = 50  # long side over short side: a processor scales the short one up
LARGEST_JSON = 16_000_000  # bytes of a config, an index, a result or a processor's settings
MOST_LABELS = 100_000  # of a config, unless a tensor has more rows; ImageNet-21k has 21,843
LONGEST_SIDE = 4096  # of a config's image_size, in pixels
LARGEST_STRING = 10_000  # characters of one string of a result
LARGEST_OPTIONS = 64_000  # bytes of --config: YAML takes a second for 200,000
LARGEST_TOKENIZER = 100_000_000  # bytes of one file of a tokenizer
CHUNK = 1 << 20


def plain_size(path: str | Path) -> int:
    """The size of a plain file; OSError for anything else, which may hang or never end."""
    try:
        info = os.stat(path)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error)) from error
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a regular file, but a pipe or a device")
    return info.st_size


def open_plain(path: str | Path, limit: int) -> BinaryIO:
    """Open a plain file of at most `limit` bytes; OSError for others."""
    if (size := plain_size(path)) > limit:
        raise OSError(errno.EFBIG, f"{size:,} bytes, {limit:,} at most")
    return open(path, "rb")


def read_plain(path: str | Path, limit: int) -> bytes:
    """The content of a plain file of at most `limit` bytes; OSError for others."""
    with open_plain(path, limit) as file:
        return file.read(limit)


def unpack_xz(file: BinaryIO) -> bytes:
    """The text in an .xz file, of one stream or several; OSError beyond LARGEST_TEXT."""
    parts, total = [], 0
    for part in _unpacked(file):
        total += len(part)
        if total > LARGEST_TEXT:
            raise OSError(errno.EFBIG, f"it unpacks to more than {LARGEST_TEXT:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """Parts of at most a megabyte, whatever a stream claims to need."""
    left = file.read(CHUNK)
    while left.strip(b"\0"):  # nothing is left, or only padding
        stream = lzma.LZMADecompressor(memlimit=LARGEST_EXPANSION)
        while not stream.eof:
            if stream.needs_input and not left and not (left := file.read(CHUNK)):
                raise EOFError("it is truncated")
            yield stream.decompress(left, CHUNK)
            left = b""
        left = stream.unused_data.lstrip(b"\0") or file.read(CHUNK)
