"""The state of a long solve, in one file that is replaced atomically: for --resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from symmerge.checkpoints.files import discard
from symmerge.checkpoints.tensor_file import read_tensors, write_tensors
from symmerge.checkpoints.weights import buffer
from symmerge.errors import CheckpointError, MismatchError
from symmerge.symmetry.groups import Element

FORMAT = "symmerge.resume/2"
REMEDY = "remove it and start again"
Elements = Mapping[str, Element]


@dataclass(frozen=True)
class ResumeEntry:
    """A record, and its elements by name: the best, the current, ..."""

    record: Mapping[str, Any]
    elements: Mapping[str, Elements]


@dataclass(frozen=True)
class ResumeFile:
    """A file to resume from. `task` says what is solved; an entry about another is refused."""

    path: Path
    task: Mapping[str, Any]

    def write(self, entry: ResumeEntry) -> None:
        # Copies: the best may be the current one, and tensors that share memory are not stored.
        tensors = {
            f"{which}/{space}/{part}": value.clone()
            for which, elements in entry.elements.items()
            for space, element in elements.items()
            for part, value in element.items()
        }
        record = json.dumps(entry.record)
        header = {
            "format": FORMAT,
            "task": json.dumps(self.task, sort_keys=True),
            "record": record,
            "sha256": _digest(record, tensors),
        }
        write_tensors(self.path, tensors, header)

    def read(self) -> ResumeEntry | None:
        """The last entry, if there is one."""
        if not self.path.exists():
            return None
        header, tensors = read_tensors(self.path, FORMAT, "a file to resume from", REMEDY)
        record = str(header.get("record"))
        # What is in it is used in many places: none has to expect anything but what was written.
        if header.get("sha256") != _digest(record, tensors):
            raise CheckpointError(f"{self.path} is damaged (its SHA-256 differs): {REMEDY}")
        if header.get("task") != json.dumps(self.task, sort_keys=True):
            raise MismatchError(
                f"{self.path} was left by another run (other models or settings):"
                " repeat that command with --resume, or remove the file"
            )
        return ResumeEntry(json.loads(record), _nested(tensors))

    def remove(self) -> None:
        discard(self.path)


def _digest(record: str, tensors: Mapping[str, Tensor]) -> str:
    """The hash of all that a file holds, beside its task."""
    digest = hashlib.sha256(record.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode("utf-8", "replace"))
        digest.update(buffer(tensor.contiguous()))
    return digest.hexdigest()


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, dict[str, Tensor]]]:
    nested: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, value in tensors.items():
        which, space, part = name.split("/")
        nested.setdefault(which, {}).setdefault(space, {})[part] = value
    return nested
