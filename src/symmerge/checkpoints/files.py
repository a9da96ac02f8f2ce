"""Small files: JSON in and out, and the one way to write a file atomically."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from symmerge.errors import CheckpointError

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


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Write JSON as the hub does: sorted keys, two spaces."""
    write_text(file, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}): {RESTORE}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object: {RESTORE}")
    return content
