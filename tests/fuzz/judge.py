"""Was it clean? Exit code, one line, nothing left behind, nothing touched, memory and time."""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from fuzz.sandbox import Ended

MEMORY = 500_000_000
REFUSAL_SECONDS = 3.0  # of processor time, where a second is promised: machines differ
LONGEST_LINE = 2100  # a little more than the console cuts at
CLEAN = ("done", "no", "refused", "usage")
Snapshot = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Outcome:
    """`kind` is one of CLEAN, or what was wrong; `where` is a line of the source, if any."""

    kind: str
    where: str = ""
    said: str = ""

    @property
    def clean(self) -> bool:
        return self.kind in CLEAN


def snapshot(folder: Path) -> Snapshot:
    """Every path below a folder, with what changes when a file is written."""
    found: Snapshot = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            about = os.lstat(os.path.join(root, name))
            path = os.path.relpath(os.path.join(root, name), folder)
            if stat.S_ISDIR(about.st_mode):
                found[path] = (about.st_mode,)
            else:
                found[path] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def changes(before: Snapshot, after: Snapshot) -> set[str]:
    """Paths that are new, gone or written."""
    return {path for path in before.keys() | after if before.get(path) != after.get(path)}


def judge(
    ended: Ended, changed: Collection[str], writes: Collection[str], codes: Collection[int]
) -> Outcome:
    """The first thing that is wrong, or how it ended. `writes` are prefixes of what may change."""
    failed = _failed(ended, codes)
    if failed:
        return failed
    if ended.grown > MEMORY:
        return Outcome("memory", said=f"{ended.grown / 1e6:.0f} MB; {_last(ended.err)}")
    if strange := sorted(path for path in changed if not path.startswith(tuple(writes))):
        return Outcome("touched", said=f"{', '.join(strange[:5])}; {_last(ended.err)}")
    if ended.code == 2 and ended.seconds > REFUSAL_SECONDS:
        return Outcome("slow", said=f"{ended.seconds:.1f} s; {_last(ended.err)}")
    return _said(ended)


def _failed(ended: Ended, codes: Collection[int]) -> Outcome | None:
    """Crashes, hangs, tracebacks and exit codes that are not documented."""
    if "Timeout (" in ended.err or ended.code in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome("hang", _where(ended.err, last=False), "")
    if ended.code < 0:
        return Outcome("crash", _where(ended.err, last=False), f"signal {-ended.code}")
    if file := re.search(r"please report it, with the details in (\S+)", ended.err):
        details = Path(file[1]).read_text("utf-8", "replace") if Path(file[1]).exists() else ""
        return Outcome("unexpected", _where(details), _last(details))
    if "Traceback (most recent call last)" in ended.err:
        return Outcome("traceback", _where(ended.err), _last(ended.err))
    if ended.code not in codes:
        return Outcome("exit code", said=f"{ended.code}; {_last(ended.err)}")
    return None


def _said(ended: Ended) -> Outcome:
    """A refusal is one line of ours, or the parser's box of usage."""
    lines = [line for line in ended.err.splitlines() if not line.startswith("warning: ")]
    if ended.code == 0 and not lines:
        return Outcome("done")
    if ended.code == 1 and not lines:
        return Outcome("no")
    if ended.code == 2 and lines and lines[0].startswith("Usage: "):
        return Outcome("usage", said=" ".join(ended.err.split()))
    if ended.code == 2 and len(lines) == 1 and lines[0].startswith("error: "):
        kind = "refused" if len(lines[0]) <= LONGEST_LINE else "long line"
        return Outcome(kind, said=lines[0][:300])
    return Outcome("noise", said=" | ".join(lines)[:300])


def _where(text: str, *, last: bool = True) -> str:
    """The innermost line of symmerge in a traceback, and the kind of error."""
    frames = re.findall(r'File "[^"]*/symmerge/([\w/]+\.py)", line (\d+),? in (\w+)', text)
    if not frames:
        return ""
    file, line, name = frames[-1 if last else 0]
    kind = re.match(r"[\w.]+", _last(text)) if last else None
    return f"{file}:{line} {name}{f' {kind[0]}' if kind else ''}"


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""
