"""Files that are made once, and appear whole; and how far one is with them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from symmerge.checkpoints.files import replacing
from symmerge.errors import DataError

T = TypeVar("T")
PROGRESS_SECONDS = 5.0  # seconds from one line to the next


def cached(target: Path, make: Callable[[Path], Any]) -> Path:
    """A file or folder that `make` writes if it is not there. Two processes may both make it: the same, and one of them wins."""
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
    """The same items; on a terminal's standard error a line says every few seconds how far one is."""
    said = time.monotonic()
    for at, item in enumerate(items):
        if time.monotonic() - said > PROGRESS_SECONDS and sys.stderr.isatty():
            said = time.monotonic()
            print(f"{what}: {at:,} of {len(items):,}", file=sys.stderr, flush=True)
        yield item
