"""Save and load the state of an interrupted training run: one file beside the output folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from symmerge.checkpoints.files import replacing
from symmerge.errors import CheckpointError, MismatchError


def partial_file(out: Path) -> Path:
    """The state file of a run that will write `out`."""
    return out.with_name(f"{out.name}.partial")


def save_state(file: Path, origin: Mapping[str, object], state: Mapping[str, object]) -> None:
    """Replace the saved state atomically: a run killed here leaves the old one."""
    try:
        with replacing(file) as beside:
            torch.save({"origin": dict(origin), "state": dict(state)}, beside)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be written ({error.strerror}): free some space or change --out"
        ) from error


def load_state(file: Path, origin: Mapping[str, object]) -> dict[str, Any] | None:
    """The saved state, if any; the state of a different run is refused."""
    if not file.exists():
        return None
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        before, state = content["origin"], content["state"]
    except Exception as error:  # torch raises many kinds for damaged files
        reason = " ".join(str(error).split())[:100]
        raise CheckpointError(
            f"{file} cannot be read ({reason}): remove it, or leave out --resume"
        ) from error
    differs = sorted(name for name in origin if before.get(name) != origin[name])
    if differs:
        raise MismatchError(
            f"{file} was begun with another {', '.join(differs)}:"
            " give the same options, or leave out --resume"
        )
    return state
