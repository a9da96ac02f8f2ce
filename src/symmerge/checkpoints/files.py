"""Small files: JSON in and out, and the one way to write a file atomically."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from symmerge.errors import CheckpointError, SymmergeWarning

RESTORE = "restore it from where the model came"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target`, for a file or a folder; renamed to `target` at the end.

    After an error, `target` is unchanged. The suffix is kept: NumPy depends on it.
    """
    # Unique across machines that share a file system, too.
    beside = target.with_name(f".{target.stem}.{uuid4().hex}.partial{target.suffix}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield beside
        beside.replace(target)
    finally:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write text in UTF-8: a reader sees the old file or the new one, never half of it."""
    with replacing(file) as beside:
        beside.write_text(text, "utf-8")


def set_aside(*files: Path) -> None:
    """Keep what an earlier run left to resume from, under another name, and say so."""
    for file in files:
        if file.exists():
            copy = file.with_name(f"{file.name}.bak")
            file.replace(copy)
            warnings.warn(
                f"{file.name} of an interrupted run is now {copy}: to continue that run, rename it"
                " back and give --resume",
                SymmergeWarning,
                stacklevel=2,
            )


def write_own_text(file: Path, text: str, mark: str) -> None:
    """Write text that holds `mark`; a file without that mark is not ours and is not replaced."""
    assert mark in text
    refuse_foreign(file, mark)
    write_text(file, text)


def refuse_foreign(file: Path, mark: str) -> None:
    """Refuse a file that is there already and does not hold the mark of what we write."""
    if file.exists() and not (file.is_file() and mark.encode() in file.read_bytes()):
        raise CheckpointError(
            f"{file} exists, and symmerge did not write it: choose another name, or move it away"
        )


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Write JSON as the hub does: sorted keys, two spaces."""
    write_text(file, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise CheckpointError(f"{file} is not valid JSON ({error}): {RESTORE}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object: {RESTORE}")
    return content
