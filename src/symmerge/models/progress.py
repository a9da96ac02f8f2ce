"""Lines that report progress, and how far a long job is."""

from __future__ import annotations

from typing import final


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
