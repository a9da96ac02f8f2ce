"""What a long job is doing: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock, Timer
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

PATIENCE = 3.0  # seconds without a line, where there is no terminal
SECONDS_BETWEEN = 10.0  # lines of one phase where there is no terminal
WORTH_TELLING = 1.0  # seconds; shorter phases leave no line on a terminal
ITEM = 40  # characters of a detail beside the bar


@final
class Phases:
    """Reports phases to a console; `tell` prints a line there.

    On a terminal one phase at a time has a bar, and leaves a line with its seconds when it ends.
    Elsewhere a job that takes more than three seconds prints every phase as a line when it begins,
    and how far it is every ten seconds; shorter ones print nothing, so that a refusal is one line.
    Details appear beside the bar, and as lines if `verbose`.
    """

    def __init__(self, console: Callable[[], Console], tell: Callable[..., None]) -> None:
        self.verbose = False
        self._console, self._tell = console, tell
        self._drawn: Progress | None = None
        self._name, self._began, self._last = "", 0.0, 0.0
        self._held: list[str] = []  # lines of a job that may be over before they are worth reading
        self._timer: Timer | None = None
        self._lock = Lock()

    def __call__(self, line: str) -> None:
        if isinstance(line, Phase):
            self.begin(line)
        elif isinstance(line, Counted):
            self._count(line)
        elif isinstance(line, Notice):
            self._line(line)
        else:
            self._detail(line)

    def begin(self, name: str) -> None:
        """Begin a phase; the one before it ends."""
        self.end()
        self._name, self._began = name, time.monotonic()
        self._last = self._began
        if not self._console().is_terminal:
            self._line(name)
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

    def close(self) -> None:
        """The end of a job: nothing is shown any more, and lines that were held are dropped."""
        self.end()
        with self._lock:
            if self._timer:
                self._timer.cancel()
            self._timer, self._held = None, []

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
            self._line(f"  {self._name}: {line.done} of {line.total}")
        if self.verbose:
            self._tell(f"  {line}", style="dim", markup=False)

    def _detail(self, line: str) -> None:
        if self._drawn:
            self._drawn.update(self._drawn.task_ids[0], item=escape(line[:ITEM]))
        if self.verbose:
            self._tell(f"  {line}", style="dim", markup=False)

    def _line(self, line: str) -> None:
        """Print a line at once on a terminal; elsewhere, when the job has lasted long enough."""
        with self._lock:
            if not self._console().is_terminal and not self.verbose and not self._is_long():
                self._held.append(line)
                return
        self._tell(line, markup=False)

    def _is_long(self) -> bool:
        if self._timer is None:
            self._timer = Timer(PATIENCE, self._release)
            self._timer.daemon = True
            self._timer.start()
        return self._timer.finished.is_set()

    def _release(self) -> None:
        """The job takes a while: print what was held."""
        with self._lock:
            held, self._held = self._held, []
            if self._timer:
                self._timer.finished.set()  # here, or a line in between would be held for ever
            for line in held:
                self._tell(line, markup=False)

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
