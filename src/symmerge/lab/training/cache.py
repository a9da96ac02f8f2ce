"""Cached files that are prepared once, with progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from symmerge.checkpoints.files import replacing
from symmerge.errors import DataError

T = TypeVar("T")
PROGRESS_SECONDS = 5.0  # between two lines


def cached(target: Path, make: Callable[[Path], object]) -> Path:
    """A file or folder that `make` writes if it is absent.

    Two processes may both write it: the content is the same, and one of them wins the rename.
    """
    if target.exists():
        return target
    try:
        with replacing(target) as beside:
            make(beside)
    except OSError as error:
        if not target.exists():
            raise DataError(
                f"{target} cannot be written ({error.strerror}):"
                " set SYMMERGE_CACHE to a folder for prepared data"
            ) from error
    return target


def with_progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items; on a terminal, report progress on stderr every few seconds."""
    printed = time.monotonic()
    for at, item in enumerate(items):
        if time.monotonic() - printed > PROGRESS_SECONDS and sys.stderr.isatty():
            printed = time.monotonic()
            print(f"{what}: {at:,} of {len(items):,}", file=sys.stderr, flush=True)
        yield item
