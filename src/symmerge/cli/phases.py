"""What a long job is doing: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from symmerge.models.progress import Counted, Notice, Phase

SECONDS_BETWEEN = 10.0  # lines of one phase where there is no terminal
WORTH_TELLING = 1.0  # seconds; shorter phases leave no line on a terminal
ITEM = 40  # characters of a detail beside the bar


@final
class Phases:
    """Reports phases to a console; `tell` prints a line there.

    On a terminal one phase at a time has a bar, and leaves a line with its seconds when it ends.
    Elsewhere every phase is a line when it begins, with how far it is every ten seconds.
    Details appear beside the bar, and as lines if `verbose`; nothing appears if `quiet`.
    """

    def __init__(self, console: Callable[[], Console], tell: Callable[..., None]) -> None:
        self.verbose = self.quiet = False
        self._console, self._tell = console, tell
        self._drawn: Progress | None = None
        self._name, self._began, self._last = "", 0.0, 0.0

    def __call__(self, line: str) -> None:
        if self.quiet:
            return
        if isinstance(line, Phase):
            self.begin(line)
        elif isinstance(line, Counted):
            self._count(line)
        elif isinstance(line, Notice):
            self._tell(line, markup=False)
        else:
            self._detail(line)

    def begin(self, name: str) -> None:
        """Begin a phase; the one before it ends."""
        self.end()
        self._name, self._began = name, time.monotonic()
        self._last = self._began
        if not self._console().is_terminal:
            self._tell(name, markup=False)
            return
        self._drawn = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            _TimeLeft(),
            TextColumn("[dim]{task.fields[item]}"),
            console=self._console(),
            transient=True,
        )
        self._drawn.add_task(escape(name), total=None, item="")
        self._drawn.start()

    def end(self) -> None:
        """Remove the bar; the line of a phase that took a while stays."""
        if self._drawn is None:
            return
        self._drawn.stop()
        self._drawn = None
        seconds = time.monotonic() - self._began
        if seconds >= WORTH_TELLING:
            self._tell(f"{self._name} ({seconds:.0f} s)", style="dim", markup=False)

    def _count(self, line: Counted) -> None:
        if self._drawn:
            task = self._drawn.task_ids[0]
            self._drawn.update(task, completed=line.done, total=line.total)
        elif self._due():
            self._tell(f"  {self._name}: {line.done} of {line.total}", markup=False)
        if self.verbose:
            self._tell(f"  {line}", style="dim", markup=False)

    def _detail(self, line: str) -> None:
        if self._drawn:
            self._drawn.update(self._drawn.task_ids[0], item=escape(line[:ITEM]))
        if self.verbose:
            self._tell(f"  {line}", style="dim", markup=False)

    def _due(self) -> bool:
        now = time.monotonic()
        due = not self._console().is_terminal and now - self._last >= SECONDS_BETWEEN
        self._last = now if due else self._last
        return due


class _TimeLeft(ProgressColumn):
    """The time left, where it can be known."""

    def render(self, task: Task) -> Text:
        seconds = task.time_remaining
        if seconds is None:
            return Text("")
        minutes, seconds = divmod(round(seconds), 60)
        return Text(f"{minutes}:{seconds:02d} left", style="cyan")
