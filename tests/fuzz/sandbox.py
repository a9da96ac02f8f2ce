"""Run one thing in a forked child with limits on time, memory and files."""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SECONDS = 10.0  # of processor time: other work on the machine does not count
WAITING = 3.0  # times that much on the clock: what waits for a pipe needs no processor
GRACE = 5.0  # for writing down where it hung
ADDRESS_SPACE = 4 << 30  # beyond what the parent has: contains a hog, which is judged by less
FILE_SIZE = 1 << 30
CRASHED = 70  # exit code of an exception that nobody caught


@dataclass(frozen=True)
class Ended:
    """How a child ended; `grown` is the largest resident memory beyond the start's, in bytes."""

    code: int  # negative: the signal
    seconds: float
    grown: int
    out: str
    err: str


@dataclass(frozen=True)
class Child:
    """A child that runs."""

    process: int
    folder: Path
    started: float


def start(action: Callable[[], None], folder: Path, seconds: float = SECONDS) -> Child:
    """Fork; the child runs `action` in `folder`/box and leaves what it said in `folder`."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        code = CRASHED
        try:
            code = _run(action, folder, seconds)
        finally:
            os._exit(code)
    return Child(process, folder, time.monotonic())


def overdue(child: Child, seconds: float = SECONDS) -> None:
    """Kill a child that does not end by itself."""
    if time.monotonic() - child.started > seconds * WAITING + GRACE:
        os.kill(child.process, signal.SIGKILL)


def ended(child: Child, status: int, seconds: float) -> Ended:
    """What the child left."""
    lines = _text(child.folder / "memory").split()
    grown = int(lines[1]) - int(lines[0]) if len(lines) == 2 else 0
    out, err = _text(child.folder / "stdout"), _text(child.folder / "stderr")
    return Ended(os.waitstatus_to_exitcode(status), seconds, grown, out, err)


def run(action: Callable[[], None], folder: Path, seconds: float = SECONDS) -> Ended:
    """Run one child to its end."""
    child = start(action, folder, seconds)
    while True:
        process, status, usage = os.wait4(child.process, os.WNOHANG)
        if process:
            return ended(child, status, usage.ru_utime + usage.ru_stime)
        overdue(child, seconds)
        time.sleep(0.01)


def _run(action: Callable[[], None], folder: Path, seconds: float) -> int:
    _redirect(folder)
    _limit(seconds)
    faulthandler.enable()
    faulthandler.register(signal.SIGXCPU, chain=True)
    faulthandler.dump_traceback_later(seconds * WAITING, exit=True)
    memory = [_status("VmRSS")]
    try:
        action()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = CRASHED
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    memory.append(_status("VmHWM"))
    (folder / "memory").write_text(" ".join(map(str, memory)))
    return code


def _redirect(folder: Path) -> None:
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8") for n in (1, 2))
    for name in ("box", "tmp", "home"):
        (folder / name).mkdir(exist_ok=True)
    os.chdir(folder / "box")
    tempfile.tempdir = str(folder / "tmp")
    os.environ.update(TMPDIR=str(folder / "tmp"), HOME=str(folder / "home"))


def _limit(seconds: float) -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts here
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 2))


def _status(name: str) -> int:
    """A number of bytes that the kernel knows about this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:"))


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace") if file.exists() else ""
