"""The licence of a checkpoint, as its model card names it, and what a merge of several has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from symmerge.checkpoints.limits import read_plain

LARGEST_CARD = 1_000_000  # bytes
# By lines instead of YAML: nothing of a stranger's card is built.
LICENSE = re.compile(r"^license:[ \t]*['\"]?([A-Za-z0-9][\w.+-]{0,99})['\"]?[ \t]*$", re.MULTILINE)
FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)


def read_license(folder: Path | None) -> str | None:
    """The licence in the front matter of a folder's README.md, if there is one."""
    try:
        text = read_plain(folder / "README.md", LARGEST_CARD).decode("utf-8") if folder else ""
    except (OSError, ValueError):
        return None
    front = FRONT_MATTER.match(text.replace("\r\n", "\n"))
    named = LICENSE.search(front.group(1)) if front else None
    return named.group(1).lower() if named else None


def joint_license(licenses: Iterable[str | None]) -> str | None:
    """The licence that all have; `other` where they differ; None where none is known.

    >>> joint_license(["mit", "mit"]), joint_license(["mit", "apache-2.0"]), joint_license([None])
    ('mit', 'other', None)
    """
    known = set(licenses)
    if known == {None}:
        return None
    return known.pop() if len(known) == 1 else "other"
