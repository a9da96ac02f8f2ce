"""Small files: JSON in and out, and the one way to write a file atomically."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from symmerge.checkpoints.limits import LARGEST_JSON, read_plain
from symmerge.errors import CheckpointError, SymmergeWarning

RESTORE = "restore it from the original model"
MARKED = 65_536  # bytes from the start of a file, in which its mark lies


HOST = sha256(socket.gethostname().encode()).hexdigest()[:8]
TEMPORARY = re.compile(r"\.(.*)\.([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{8}\.partial(\..*)?")
"""Names of temporary files: stem, machine, process, suffix."""
_writing: set[Path] = set()  # temporary files of this process


@contextmanager
def replacing(target: Path, *, in_folder: bool = False) -> Iterator[Path]:
    """A temporary path beside `target`, for a file or a folder; renamed to `target` at the end.

    After an error, `target` is unchanged. What killed writers of it left here is removed. With
    `in_folder` the path is in a folder of its own, for writers that make temporary files, too.
    A link to a file is followed: what it leads to is replaced, not the link.
    """
    target = follow_file_link(target)
    # Unique across machines that share a file system, too. The suffix is kept for NumPy.
    writer = f"{HOST}-{os.getpid()}-{uuid4().hex[:8]}"
    beside = target.with_name(f".{target.stem}.{writer}.partial{target.suffix}")
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporary(target)
    _writing.add(beside)
    try:
        if in_folder:
            beside.mkdir()
        written = beside / target.name if in_folder else beside
        yield written
        written.replace(target)
    finally:
        _remove(beside)
        _writing.discard(beside)


def follow_file_link(file: Path) -> Path:
    """Where a linked file lies, or will lie; OSError for links in a circle.

    A link to a folder is itself what is replaced: experiments link to models of the user.
    """
    if not file.is_symlink() or file.is_dir():
        return file
    place = Path(os.path.realpath(file))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
    return place


def discard(file: Path) -> None:
    """Remove a file, and what killed writers of it left."""
    file.unlink(missing_ok=True)
    sweep_temporary(file)


def sweep_temporary(target: Path) -> None:
    """Remove temporary files for `target` of processes that were killed on this machine."""
    for name in os.listdir(target.parent) if target.parent.is_dir() else ():
        match = TEMPORARY.fullmatch(name)
        if match is None or (match[1], match[4] or "", match[2]) != (
            target.stem,
            target.suffix,
            HOST,
        ):
            continue
        left = target.with_name(name)
        if left not in _writing and not process_alive(int(match[3])):
            _remove(left)


def process_alive(process: int) -> bool:
    """Whether another process has this number; our own may have been a killed one's."""
    if process == os.getpid():  # containers reuse low numbers
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write text in UTF-8: a reader sees the old file or the new one, never half of it."""
    with replacing(file) as beside:
        beside.write_text(text, "utf-8")


def set_aside(*files: Path) -> None:
    """Keep what an earlier run left to resume from, under another name, and say so."""
    for file in files:
        if file.exists():
            copy = _free_name(file)
            file.replace(copy)
            sweep_temporary(file)
            warnings.warn(
                f"{file.name} of an interrupted run is now {copy}: to continue that run, rename it"
                " back and add --resume",
                SymmergeWarning,
                stacklevel=2,
            )


def _free_name(file: Path) -> Path:
    """A name for a copy that no file has: an earlier copy is kept as well."""
    numbers = ("", *map(str, range(2, 10_000)))
    names = (file.with_name(f"{file.name}.bak{number}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def write_own_text(file: Path, text: str, mark: str) -> None:
    """Write text that holds `mark`; a file without that mark is not ours and is not replaced."""
    assert mark in text[:MARKED]
    refuse_foreign(file, mark)
    write_text(file, text)


def refuse_foreign(file: Path, mark: str) -> None:
    """Refuse a file that is there already and does not hold the mark of what we write."""
    if file.exists() and not (file.is_file() and mark.encode() in _beginning(file)):
        raise CheckpointError(
            f"{file} exists, but symmerge did not write it: choose another name, or move it away"
        )


def _beginning(file: Path) -> bytes:
    """Where our marks are: a file of the user may have gigabytes."""
    with open(file, "rb") as content:
        return content.read(MARKED)


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Write JSON as the hub does: sorted keys, two spaces."""
    write_text(file, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        content = json.loads(read_plain(file, LARGEST_JSON).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise CheckpointError(f"{file} is not valid JSON ({error}): {RESTORE}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object: {RESTORE}")
    return content
