"""Which files of a model folder may be read: plain files that lie in it."""

from __future__ import annotations

import stat
from pathlib import Path

from symmerge.errors import CheckpointError, shown

SNAPSHOTS, BLOBS = "snapshots", "blobs"  # the hub's cache links snapshots/HASH/file to blobs/HASH


def check_plain(file: Path, folder: Path) -> Path:
    """`file`, if it is a plain file inside `folder`; links within the hub's cache count as such.

    A link elsewhere would copy what it points to into the output. A FIFO would hang the reader.
    """
    if ".." in file.parts[len(folder.parts) :] or folder not in file.parents:
        raise CheckpointError(
            f"{file} is outside {folder}: only files in the folder are read; correct its name"
        )
    place = _place(file)
    inside = place.is_relative_to(folder.resolve()) or place.is_relative_to(_blobs(folder))
    if not inside:
        raise CheckpointError(
            f"{file} links to {place}, outside its folder: put a copy of the file there instead"
        )
    if place.exists() and not stat.S_ISREG(place.stat().st_mode):
        raise CheckpointError(f"{file} is not a regular file: replace it with one, or remove it")
    return file


def _place(file: Path) -> Path:
    """The file that a name leads to; names that no file can have are refused."""
    try:
        place = file.resolve()
        place.exists()
        return place
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a zero byte, a loop
        raise CheckpointError(
            f"{shown(str(file), 200)} cannot be the name of a file: correct its name"
        ) from error


def _blobs(folder: Path) -> Path:
    """Where the hub's cache keeps the contents of a snapshot; the folder itself elsewhere."""
    folder = folder.resolve()
    cached = folder.parent.name == SNAPSHOTS
    return folder.parent.parent / BLOBS if cached else folder
