"""What a mutator returns: new bytes for a file, or something else in its place."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

OUTSIDE = "outside"  # a folder beside the inputs, which no verb may touch
SECRET = "secret.txt"
SPARSE = 1 << 40


@dataclass(frozen=True)
class Damage:
    """`kind` is `bytes`, or a key of `PLACES`; `what` names the mutation."""

    what: str
    kind: str = "bytes"
    content: bytes = b""

    def put(self, file: Path) -> None:
        """Do it to a file of a copy."""
        if self.kind == "bytes":
            file.write_bytes(self.content)
        else:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
            PLACES[self.kind](file)


Mutator = Callable[[random.Random, bytes], Damage]


def _linked(target: str) -> Callable[[Path], None]:
    return lambda file: file.symlink_to(target)


def _link_out(file: Path) -> None:
    outside = next(parent / OUTSIDE for parent in file.parents if (parent / OUTSIDE).is_dir())
    file.symlink_to(outside / SECRET)


def _sparse(file: Path) -> None:
    with open(file, "wb") as opened:
        opened.truncate(SPARSE)  # takes no room on the disk


def _folder_with_file(file: Path) -> None:
    file.mkdir()
    (file / "x").write_text("x")


PLACES: Mapping[str, Callable[[Path], None]] = {
    "missing": lambda file: None,
    "folder": Path.mkdir,
    "full folder": _folder_with_file,
    "fifo": lambda file: os.mkfifo(file),
    "dangling link": _linked("nowhere"),
    "looping link": lambda file: file.symlink_to(file.name),
    "link outside": _link_out,
    "link to /dev/zero": _linked("/dev/zero"),
    "link to /dev/null": _linked("/dev/null"),
    "link to a folder": _linked("."),
    "sparse": _sparse,
}


def replace_file(rng: random.Random, content: bytes) -> Damage:
    """Something that is no plain file, or none at all."""
    kind = rng.choice([*PLACES])
    return Damage(f"place: {kind}", kind)
