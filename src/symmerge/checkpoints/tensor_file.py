"""Small files of tensors with a header: alignments, statistics, resume files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from symmerge.checkpoints.files import replacing
from symmerge.checkpoints.limits import plain_size
from symmerge.checkpoints.safetensors_files import LARGEST_HEADER
from symmerge.errors import CheckpointError

# A single metadata entry: safetensors writes several in arbitrary order, but equal content should
# give equal bytes.
KEY = "symmerge"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, object]) -> None:
    """Write tensors and a header, atomically."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        with replacing(path, in_folder=True) as beside:  # safetensors makes a .tmpXXXXXX
            save_file(contiguous, beside, {KEY: json.dumps(dict(header))})
            beside.chmod(0o666 & ~_umask())  # safetensors makes its files private
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def read_tensors(
    path: str | Path, format: str, what: str, remedy: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file with this format; any other is refused, with the remedy."""
    try:
        _check_header_size(path)
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(KEY, "{}"))
            # Copies: mapped bytes are not aligned, and complex arithmetic on them crashes torch.
            names = file.keys()
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} is not {what} ({reason}): {remedy}") from error
    if not isinstance(header, dict) or header.get("format") != format:
        raise CheckpointError(f"{path} is not {what} of this version ({format}): {remedy}")
    return header, tensors


def refuse_foreign_tensors(path: Path, format: str) -> None:
    """Refuse to replace a file that is there already and has another format, by its header."""
    try:
        _check_header_size(path)
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(KEY, "{}"))
            if isinstance(header, dict) and header.get("format") == format:
                return
    except FileNotFoundError:
        return
    except (OSError, SafetensorError, ValueError, RecursionError):
        pass
    raise CheckpointError(
        f"{path} exists, but is not a {format} file written by symmerge: choose another name, or"
        " move it away"
    )


def _check_header_size(path: str | Path) -> None:
    """Before the file is mapped, which fails for sizes that no machine has."""
    length = plain_size(path)
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(length - 8, LARGEST_HEADER):
        raise ValueError(f"its header has {size} bytes of {length} in all")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
