"""SHA-256 of files, folders and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from symmerge.checkpoints.reading import TOKENIZER_FILES, read_config, weight_files
from symmerge.errors import CheckpointError


def checkpoint_digest(path: str | Path) -> str:
    """The hash of a checkpoint (config, weights, tokenizer files), wherever it is stored.

    Other files in the folder do not count.
    """
    path = Path(path)
    read_config(path)
    tokenizer = [
        file
        for file in path.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in TOKENIZER_FILES)
    ]
    return files_digest(path, {path / "config.json", *weight_files(path), *tokenizer})


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """The hash of the names and contents of files in a folder."""
    lines = [
        f"{file.relative_to(folder).as_posix()} {_file_digest(file)}\n" for file in sorted(files)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def path_digest(path: Path) -> str:
    """The hash of a file, or of all files in a folder."""
    if path.is_file():
        return _file_digest(path)
    return files_digest(path, (file for file in path.rglob("*") if file.is_file()))


def _file_digest(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
