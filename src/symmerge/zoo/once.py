"""Files that are made once, and appear whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from symmerge.errors import DataError


def once(target: Path, make: Callable[[Path], Any]) -> Path:
    """A file or folder that `make` writes if it is not there. Two processes may both make it: the same, and one of them wins."""
    if target.exists():
        return target
    partial = target.with_name(f".{os.getpid()}.{target.name}")  # its ending stays: NumPy goes by it
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        partial.replace(target)
    except OSError as error:
        if not target.exists():
            raise DataError(f"{target} cannot be written ({error.strerror}): set SYMMERGE_CACHE to a folder for prepared data") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
    return target
