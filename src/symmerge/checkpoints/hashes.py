"""SHA-256 of files, folders and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from symmerge.checkpoints.reading import READERS, read_config, weight_files
from symmerge.errors import CheckpointError


def content_of(path: str | Path) -> str:
    """The hash of what a checkpoint is, wherever it lies: config, weights and what reads its inputs, file by file. Nothing else in the folder counts."""
    path = Path(path)
    read_config(path)
    readers = [
        file
        for file in path.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in READERS)
    ]
    return files_digest(path, {path / "config.json", *weight_files(path), *readers})


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """The hash of what files of a folder are called and hold."""
    return hashlib.sha256(
        "".join(
            f"{file.relative_to(folder).as_posix()} {file_digest(file)}\n" for file in sorted(files)
        ).encode()
    ).hexdigest()


def any_digest(path: Path) -> str:
    """The hash of a file, or of all files in a folder."""
    return (
        file_digest(path)
        if path.is_file()
        else files_digest(path, (file for file in path.rglob("*") if file.is_file()))
    )


def file_digest(file: Path) -> str:
    """The hash of a file's bytes, however long it is."""
    try:
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
