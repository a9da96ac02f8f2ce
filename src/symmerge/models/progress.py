"""Lines that report progress: phases for people, details, and how far a long job is.

A reporter is any function that takes a line. `Phase` begins a part of the work, `Counted` says how
much of it is done, `Notice` is for everybody to read, and a plain string is a detail that most
readers never see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import final

Progress = Callable[[str], None]
ProgressLike = Progress | bool | None
"""What users may give: a function that takes lines, True for standard error, or nothing."""


@final
class Phase(str):
    """A line that begins a part of a long job, in words for everybody.

    >>> Phase("matching weights")
    'matching weights'
    """

    def __reduce__(self) -> tuple[type[Phase], tuple[str]]:
        """Lines travel between processes."""
        return Phase, (str(self),)


@final
class Notice(str):
    """A line that stays: what will be done, or what a user should know."""

    def __reduce__(self) -> tuple[type[Notice], tuple[str]]:
        return Notice, (str(self),)


@final
class Counted(str):
    """A line that also says how many of how many steps are done, for a bar with the time left.

    >>> line = Counted("step 3 of 10", 3, 10)
    >>> line, line.done, line.total
    ('step 3 of 10', 3, 10)
    """

    done: int
    total: int

    def __new__(cls, line: str, done: int, total: int) -> Counted:
        self = super().__new__(cls, line)
        self.done, self.total = done, total
        return self

    def __reduce__(self) -> tuple[type[Counted], tuple[str, int, int]]:
        """Lines travel between processes."""
        return Counted, (str(self), self.done, self.total)


def reporter(progress: ProgressLike) -> Progress:
    """A function that takes every line: True prints them, False and None take no notice.

    >>> reporter(None)("matching weights")
    """
    if callable(progress):
        return progress
    return _print if progress else _ignore


def _print(line: str) -> None:
    indent = "" if isinstance(line, Phase | Notice) else "  "
    print(f"{indent}{line}", file=sys.stderr, flush=True)


def _ignore(line: str) -> None:
    """No-op reporter."""
