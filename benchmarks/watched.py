"""Run a command and watch it: the time and processor time of every line it prints, and memory.

`anonymous` is what the process itself holds, `resident` counts mapped files as well, which the
system may drop at any time. On a machine that others use, processor time is the fairer figure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL = 0.2  # seconds
GB = 1e9
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Line:
    """A line of output, and when it came: seconds of the clock and of processors."""

    seconds: float
    processor: float
    text: str


@dataclass(frozen=True)
class Watched:
    """What a command did."""

    exit_code: int
    lines: list[Line]  # the last one is empty: the end
    memory_gb: Mapping[str, float]

    def phases(self, beginnings: Mapping[str, str]) -> dict[str, dict[str, float]]:
        """Seconds per phase, by the beginning of its first line; before any: `start`."""
        spent: dict[str, dict[str, float]] = {}
        phase, seconds, processor = "start", 0.0, 0.0
        for line in self.lines:
            row = spent.setdefault(phase, {"seconds": 0.0, "processor": 0.0})
            row["seconds"] += line.seconds - seconds
            row["processor"] += line.processor - processor
            seconds, processor = line.seconds, line.processor
            begun = (name for name, text in beginnings.items() if line.text.startswith(text))
            phase = next(begun, phase)
        return spent


def watch(command: Sequence[str], environment: Mapping[str, str]) -> Watched:
    """Run a command to its end; its lines are printed as they come."""
    began = time.perf_counter()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environment}
    )
    memory = _Memory(child.pid)
    memory.start()
    assert child.stdout
    lines = []
    for text in child.stdout:
        lines.append(Line(time.perf_counter() - began, memory.processor(), text.rstrip()))
        print(f"{lines[-1].seconds:.1f} {lines[-1].processor:.1f} {lines[-1].text}", flush=True)
    last = max(memory.spent, lines[-1].processor if lines else 0.0)
    code = child.wait()
    memory.going = False
    lines.append(Line(time.perf_counter() - began, last, ""))
    return Watched(code, lines, memory.most)


class _Memory(threading.Thread):
    """The most memory that a process held while it ran, in GB, and its processor time so far."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.going, self.spent = pid, True, 0.0
        self.most = dict.fromkeys(("anonymous", "resident", "gpu"), 0.0)

    def run(self) -> None:
        while self.going:
            for name, value in self._now():
                self.most[name] = max(self.most[name], value / GB)
            self.processor()
            time.sleep(POLL)

    def processor(self) -> float:
        """Seconds of processors that the process has taken, all threads together."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return self.spent
        self.spent = max(self.spent, (int(fields[11]) + int(fields[12])) / TICKS)
        return self.spent

    def _now(self) -> Iterator[tuple[str, float]]:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:  # it has ended
            return
        sizes = dict(line.split(":", 1) for line in lines)
        for name, key in (("anonymous", "RssAnon"), ("resident", "VmRSS")):
            yield name, float(sizes.get(key, "0 kB").split()[0]) * 1024
        if shutil.which("nvidia-smi"):
            asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            yield "gpu", float(subprocess.check_output(asked, text=True).split()[0]) * 2**20
