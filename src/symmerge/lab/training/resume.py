"""What is kept of a training that may be interrupted: one file beside the folder to be written, replaced whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from symmerge.checkpoints.files import replacing
from symmerge.errors import CheckpointError, MismatchError


def partial_file(out: Path) -> Path:
    """Where the state lies until `out` is there."""
    return out.with_name(f"{out.name}.partial")


def keep(file: Path, origin: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Replace what was kept; a run that is killed here leaves the old state."""
    try:
        with replacing(file) as beside:
            torch.save({"origin": dict(origin), "state": dict(state)}, beside)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be written ({error.strerror}): free some space or choose another --out"
        ) from error


def kept(file: Path, origin: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state, or nothing where there is none; that of another training is refused."""
    if not file.exists():
        return None
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
        before, state = found["origin"], found["state"]
    except Exception as error:  # torch raises many kinds for damaged files
        raise CheckpointError(
            f"{file} cannot be read ({' '.join(str(error).split())[:100]}): remove it, or leave out --resume"
        ) from error
    differs = sorted(name for name in origin if before.get(name) != origin[name])
    if differs:
        raise MismatchError(
            f"{file} was begun with another {', '.join(differs)}: give the same options, or leave out --resume to begin anew"
        )
    return state
