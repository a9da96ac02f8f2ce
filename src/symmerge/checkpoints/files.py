"""Small files: JSON in and out, and the one way to write a file atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symmerge.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file} is not valid JSON ({error}): restore it from where the model came"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object: restore it from where the model came")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """JSON as the hub writes it."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
