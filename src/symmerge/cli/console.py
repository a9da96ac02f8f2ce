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
from typing import Any, NoReturn

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

from symmerge.errors import SymmergeError, SymmergeWarning

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


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
    """A progress bar that advances by one item per call."""
    with bar(what, total) as (drawn, task):
        yield lambda item: drawn.update(task, advance=1, item=escape(item))


def note(line: str) -> None:
    """Report what a long job is doing, on standard error if it is a terminal."""
    if err.is_terminal:
        err.print(line, style="dim", soft_wrap=True, markup=False)


def warn(line: str) -> None:
    """What a user must know, wherever standard error goes."""
    err.print(f"[bold yellow]warning:[/] {_one_line(line)}", soft_wrap=True)


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
        err.print(interrupted, soft_wrap=True, markup=False)
        raise SystemExit(130) from error
    except BrokenPipeError as error:  # the reader of a pipe went away
        _discard_output()
        raise SystemExit(0) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
            _discard_output()
            fail("the output cannot be written: no space is left; make room for it", error)
        fail(f"{_unexpected(error)}; please report it, with the details in {_details()}", error)


def fail(line: str, error: Exception) -> NoReturn:
    """One line and exit code 2."""
    err.print(f"[bold red]error:[/] {_one_line(line)}", soft_wrap=True)
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


def _discard_output() -> None:
    """What is left for standard output goes nowhere: Python would fail on it again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    return " ".join(text.split()).replace("[", "\\[")
