"""Output of the command line: tables and progress on a terminal, plain lines in pipes."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import count
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from symmerge.cli.phases import Phases
from symmerge.errors import SymmergeError, SymmergeWarning
from symmerge.models.progress import Counted, Phase

LONGEST_LINE = 2000  # names in damaged files may have megabytes
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
# Of the user's paths, wherever they are noticed
PATH_ERRORS = (
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOSPC),
    *(errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.EFBIG, errno.EIO),
)

NO_MEMORY = "out of memory"
LESS_MEMORY = (
    "--effort fast needs the least; a smaller --batch-size lowers what learning needs, --device cpu"
    " uses the machine's memory instead of the GPU's; --resume continues from what align had found"
)
CLOSED_PIPE = 141  # as of a program that SIGPIPE ends: neither yes nor no


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to `friendly`; rich would exit with 1, which says no."""
        raise


out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)


def say(line: str) -> None:
    """One line of the answer."""
    out.print(line, soft_wrap=True, markup=False)  # a path may hold square brackets


def show_json(content: object) -> None:
    """Print the answer as JSON."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def show_table(title: str, rows: Iterable[Mapping[str, object]]) -> None:
    """Print a table on a terminal, tab-separated lines with a header elsewhere."""
    rows = list(rows)
    columns = list(rows[0]) if rows else []
    if not out.is_terminal:
        cells = [columns, *([cell(row[column]) for column in columns] for row in rows)]
        lines = ["\t".join(line) for line in cells]
        sys.stdout.write("\n".join([f"# {title}", *lines]) + "\n")
        return
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for column in columns:
        numeric = isinstance(rows[0][column], int | float)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell(row[column])) for column in columns))
    out.print(table)


def cell(value: object) -> str:
    """Format a value of a table: short numbers, an empty cell for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.1e}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


@contextmanager
def bar(what: str, total: int) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on a terminal's standard error; nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[item]}"),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as drawn:
        yield drawn, drawn.add_task(escape(what), total=total, item="")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A phase of so many items; what it yields is called for each."""
    done = count()
    note(Phase(what))
    try:
        yield lambda item: note(Counted(item, next(done) + 1, total))
    finally:
        phases.end()


def warn(line: str) -> None:
    """What a user must know, wherever standard error goes."""
    _tell(f"[bold yellow]warning:[/] {_one_line(line)}")


def _tell(line: str, **options: Any) -> None:
    """Print to standard error; where it is closed or full, the work goes on without."""
    try:
        err.print(line, soft_wrap=True, **options)
    except OSError:
        _discard(sys.stderr)


phases = Phases(lambda: err, _tell)


def note(line: str) -> None:
    """Report what a long job is doing: a phase, how far it is, or a detail of it."""
    phases(line)


@contextmanager
def friendly(interrupted: str = "interrupted: nothing was written") -> Iterator[None]:
    """Errors in one line and exit code 2, warnings in one line each, Ctrl-C with exit code 130."""
    try:
        with _warnings_shown():
            yield
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except SymmergeError as error:
        fail(str(error), error)
    except KeyboardInterrupt as error:
        _tell(interrupted, markup=False)
        raise SystemExit(130) from error
    except BrokenPipeError as error:  # the reader of a pipe went away
        _discard(sys.stdout)
        raise SystemExit(CLOSED_PIPE) from error
    except Exception as error:
        if _is_memory_full(error):
            fail(f"{NO_MEMORY} ({' '.join(str(error).split())[:120]}): {LESS_MEMORY}", error)
        if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS and not error.filename:
            _discard(sys.stdout)
            fail("the output cannot be written: no space is left; free some space", error)
        if isinstance(error, OSError) and error.errno in PATH_ERRORS:
            what = os.fsdecode(error.filename) if error.filename else "a file"
            fail(f"{what} cannot be used ({error.strerror}): choose another path", error)
        fail(f"{_unexpected(error)}; please report it, with the details in {_details()}", error)
    finally:
        phases.close()


def _is_memory_full(error: Exception) -> bool:
    """Python's error, that of a GPU (named, because torch may not be loaded), or torch's own."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(
        error
    )


def fail(line: str, error: Exception) -> NoReturn:
    """One line and exit code 2."""
    _tell(f"[bold red]error:[/] {_one_line(line)}")
    raise SystemExit(2) from error


def _unexpected(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"symmerge failed ({type(error).__name__}{': ' if text else ''}{text})"


def _details() -> str:
    """A file with the traceback, for a report."""
    handle, name = tempfile.mkstemp(prefix="symmerge-", suffix=".txt")
    with open(handle, "w", encoding="utf-8", errors="replace") as file:
        file.write(f"{sys.argv}\n{traceback.format_exc()}")
    return name


def _discard(stream: TextIO) -> None:
    """What is left for a stream goes nowhere: Python would fail on it again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_closed_streams() -> None:
    """Standard streams that were closed before the start go nowhere.

    Python has None in their place, and the next file that is opened would get their number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def show_any_text() -> None:
    """Replace characters that the terminal's encoding lacks, instead of failing on them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Print our own warnings as one line, others as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", SymmergeWarning)
        usual = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], *others: Any, **more: Any
        ) -> None:
            if issubclass(category, SymmergeWarning):
                warn(str(message))
            else:
                usual(message, category, *others, **more)

        warnings.showwarning = show
        yield


def _one_line(text: str) -> str:
    """A message in one line; of a long one, the beginning and the remedy at its end."""
    line = " ".join(text.split())
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
    return line.replace("[", "\\[")
