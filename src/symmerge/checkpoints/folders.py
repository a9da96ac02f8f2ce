"""Folders that appear complete or not at all, and replace nothing that is not ours."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from symmerge.checkpoints.files import TEMPORARY, process_alive, read_json, write_json
from symmerge.errors import CheckpointError

CONTENTS = ".symmerge-contents.json"
"""In every folder that symmerge writes: the files it wrote there. --overwrite goes by it."""
SHOWN = 5  # files that a refusal names


@contextmanager
def new_folder(
    target: str | Path,
    *,
    overwrite: bool = False,
    needs_bytes: int = 0,
    inputs: tuple[Path, ...] = (),
) -> Iterator[Path]:
    """A folder that appears at `target` complete or not at all.

    Everything is written beside the target and renamed at the end. A killed run leaves at most a
    hidden `.partial` folder, which the next run to the same target removes. A link is followed.
    With `overwrite`, a folder is replaced if symmerge wrote everything in it.
    """
    target = follow_link(Path(target).absolute())
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        _sweep(target)
        refuse(target, overwrite, inputs)
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(target.parent, needs_bytes)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"cannot write next to {target}: {error.strerror}; choose another --out"
        ) from error
    try:
        yield partial
        _record_contents(partial)
        refuse(target, overwrite, ())  # again: the work may have taken hours
        _swap(partial, target, overwrite)
    except OSError as error:
        raise CheckpointError(
            f"writing {target} failed: {error.strerror}; nothing was left behind"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def follow_link(target: Path) -> Path:
    """Where a linked target leads: the link itself is never replaced, and `x/..` makes no x."""
    try:
        place = target.resolve() if target.is_symlink() or ".." in target.parts else target
        place.exists()
        return place
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        reason = getattr(error, "strerror", None) or "its links lead nowhere"
        raise CheckpointError(f"cannot write {target}: {reason}; choose another --out") from error


def refuse(target: Path, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    """Refuse a target that exists, holds an input or lies in one; call it before long work."""
    target = follow_link(target)
    out = target.resolve()
    for path in inputs:
        path = path.resolve()
        if out == path or path in out.parents or out in path.parents:
            raise CheckpointError(
                f"the output {target} and the input {path} overlap: choose another --out"
            )
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists: choose another --out, or add --overwrite to replace it"
        )
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: choose another --out")
    if target.exists() and (strange := foreign_files(target)):
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        raise CheckpointError(
            f"{target} has files that symmerge did not write ({', '.join(strange[:SHOWN])}{more}):"
            " nothing was replaced; move it away, or choose another --out"
        )


def foreign_files(folder: Path) -> list[str]:
    """The files of a folder that its record does not name: all of them where there is no record.

    Also those that were written again: a user may have trained the model and saved it there.
    """
    record = folder / CONTENTS
    known = read_json(record).get("files") if record.is_file() else []
    own = {CONTENTS, *map(str, known)} if isinstance(known, list) else {CONTENTS}
    strange = set(_files(folder)) - own
    # What a killed report left of its page is ours, too.
    left = [name for name in strange if not TEMPORARY.fullmatch(Path(name).name)]
    return sorted([*left, *(f"{name}, changed since" for name in _changed(folder) if name in own)])


def add_to_contents(folder: Path, *names: str) -> None:
    """Name more files of a folder as ours, where it has a record."""
    if (folder / CONTENTS).is_file():
        known = read_json(folder / CONTENTS).get("files")
        ours = {*map(str, known if isinstance(known, list) else ())} - {*_changed(folder)}
        write_json(folder / CONTENTS, {"files": sorted(ours | {*names})})


def _changed(folder: Path) -> list[str]:
    """Files that were written after the record of the folder, which is written last."""
    record = folder / CONTENTS
    if not record.is_file():
        return []
    recorded = record.stat().st_mtime_ns
    return [name for name in _files(folder) if (folder / name).lstat().st_mtime_ns > recorded]


def _record_contents(folder: Path) -> None:
    write_json(folder / CONTENTS, {"files": [name for name in _files(folder) if name != CONTENTS]})


def _files(folder: Path) -> list[str]:
    """Everything below a folder that is no folder, and folders that are empty."""
    entries = []
    for root, folders, files in os.walk(folder):
        here = Path(root).relative_to(folder)
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        entries += [(here / name).as_posix() for name in (*files, *links)]
        if not (folders or files) and root != str(folder):
            entries.append(here.as_posix())
    return sorted(entries)


def nearest_folder(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next(folder for folder in path.absolute().parents if folder.is_dir())


def _check_space(folder: Path, needs_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needs_bytes + (1 << 20):
        raise CheckpointError(
            f"{folder} has {free / 1e9:.1f} GB free, {needs_bytes / 1e9:.1f} GB are needed:"
            " free some or choose another --out"
        )


def _sweep(target: Path) -> None:
    """Remove leftovers of killed runs for this target; restore a folder one was replacing.

    Folders of processes that are alive stay.
    """
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d{{1,9}})(\.old)?\.partial")
    for stale in target.parent.glob(".*.partial"):
        match = pattern.fullmatch(stale.name)
        if match is None or process_alive(int(match[1])):
            continue
        if match[2] and not target.exists():
            stale.rename(target)
        else:
            shutil.rmtree(stale, ignore_errors=True)


def _swap(partial: Path, target: Path, overwrite: bool) -> None:
    if not overwrite or not target.exists():
        partial.rename(target)  # fails where another run was faster
        return
    old = target.parent / f".{target.name}.{os.getpid()}.old.partial"
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
