"""Save and load the state of an interrupted training run: one file beside the output folder."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from symmerge.checkpoints.files import replacing
from symmerge.checkpoints.limits import plain_size
from symmerge.errors import CheckpointError, MismatchError

DIGEST, LENGTH = 32, 8  # bytes before the content: its SHA-256, and how many there are
REMEDY = "remove it, or leave out --resume"


def partial_file(out: Path) -> Path:
    """The state file of a run that will write `out`."""
    return out.with_name(f"{out.name}.partial")


def save_state(file: Path, origin: Mapping[str, object], state: Mapping[str, object]) -> None:
    """Replace the saved state atomically: a run killed here leaves the old one."""
    try:
        buffer = io.BytesIO()
        torch.save({"origin": dict(origin), "state": dict(state)}, buffer)
        content = buffer.getbuffer()
        digest, length = hashlib.sha256(content).digest(), len(content).to_bytes(LENGTH, "little")
        with replacing(file) as beside, open(beside, "wb") as opened:
            opened.writelines((digest, length, content))
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be written ({error.strerror}): free some space or change --out"
        ) from error


def load_state(file: Path, origin: Mapping[str, object]) -> dict[str, Any] | None:
    """The saved state, if any; the state of a different run is refused."""
    if not file.exists():
        return None
    try:
        size = plain_size(file)
        with open(file, "rb") as opened:
            digest, length = opened.read(DIGEST), int.from_bytes(opened.read(LENGTH), "little")
            content = opened.read() if size == DIGEST + LENGTH + length else b""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}): {REMEDY}") from error
    # What is in it is used in many places: none has to expect anything but what was written.
    if digest != hashlib.sha256(content).digest():
        raise CheckpointError(f"{file} is damaged (its SHA-256 differs): {REMEDY}")
    saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    before, state = saved["origin"], saved["state"]
    differs = sorted(name for name in origin if before.get(name) != origin[name])
    if differs:
        raise MismatchError(
            f"{file} was started with another {', '.join(differs)}:"
            " give the same options, or leave out --resume"
        )
    return state
