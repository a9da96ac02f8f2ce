"""What a long solve has found so far, in one file that is replaced whole: for --resume, and for whoever pulls the plug."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from symmerge.checkpoints.tensor_file import read_tensors, write_tensors
from symmerge.errors import MismatchError
from symmerge.symmetry.groups import Element

FORMAT = "symmerge.journal/1"
Elements = Mapping[str, Element]


@dataclass(frozen=True)
class ResumeEntry:
    """A record, and the elements it speaks of by name: of the best try, and of the one that is running."""

    record: Mapping[str, Any]
    elements: Mapping[str, Elements]


@dataclass(frozen=True)
class ResumeFile:
    """One file. `task` says what is being solved; an entry about something else is refused."""

    path: Path
    task: Mapping[str, Any]

    def write(self, entry: ResumeEntry) -> None:
        # a copy of each: the best so far may be the current one, and tensors that share memory cannot be stored
        tensors = {
            f"{which}/{space}/{part}": value.clone()
            for which, found in entry.elements.items()
            for space, e in found.items()
            for part, value in e.items()
        }
        header = {
            "format": FORMAT,
            "task": json.dumps(self.task, sort_keys=True),
            "record": json.dumps(entry.record),
        }
        write_tensors(self.path, tensors, header)

    def read(self) -> ResumeEntry | None:
        """The last entry, if there is one."""
        if not self.path.exists():
            return None
        header, tensors = read_tensors(self.path, FORMAT, "a journal", "remove it and start again")
        if header["task"] != json.dumps(self.task, sort_keys=True):
            raise MismatchError(
                f"{self.path} was left by another run (other models or settings): repeat that command with --resume, or remove the file"
            )
        return ResumeEntry(json.loads(header["record"]), _nested(tensors))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, dict[str, Tensor]]]:
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, value in tensors.items():
        which, space, part = name.split("/")
        found.setdefault(which, {}).setdefault(space, {})[part] = value
    return found
