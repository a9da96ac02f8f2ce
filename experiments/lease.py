"""Many measurements within the time that a GPU is lent: a plan, run from top to bottom.

    python experiments/lease.py experiments/plans/sizes.txt --seconds 540 --out $OUT

A line of a plan is `NAME SECONDS: COMMAND`, or `NAME SECONDS alone: COMMAND`; `#` begins a comment.
At most --at-once commands run side by side, one marked `alone` by itself. A command is interrupted
as by Ctrl-C after its seconds, and everything is when --seconds are over; what would have less than
half of its seconds left is not begun. So results must be written as they come, and the same plan
goes on where it ended: a command that finished is not run again while --done stands.

Every line that a command prints goes to OUT/NAME.log; `$OUT` is OUT in commands. What a later call
shall go on with belongs into --results, since OUT is emptied before each call. In the end both are
in OUT/all.tar.gz, since few files come back from a lent machine.
Why so few at once: twenty processes on one GPU finished nothing in 210 s, where one takes 15 s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

LINE = re.compile(r"(?P<name>[\w.-]+) (?P<seconds>\d+)(?P<alone> alone)?: (?P<command>.+)")
GRACE, POLL, KEPT = 20, 0.5, "all.tar.gz"


@dataclass(frozen=True)
class Step:
    """One command of a plan."""

    name: str
    seconds: float
    alone: bool
    command: str


@dataclass
class Running:
    """A command that was begun."""

    step: Step
    process: subprocess.Popen[bytes]
    until: float
    began: float = field(default_factory=time.monotonic)
    interrupted: bool = False

    def enforce(self) -> None:
        """Interrupt it when its time is over, and end it when that does not help."""
        now = time.monotonic()
        if now > self.until and not self.interrupted:
            self.interrupted = True
            self.signal(signal.SIGINT)
        elif now > self.until + GRACE:
            self.signal(signal.SIGTERM)  # never SIGKILL: it can break the GPU for all others

    def signal(self, kind: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, kind)


def read_plan(path: Path) -> list[Step]:
    """The steps of a plan; a line that is none is an error."""
    steps = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            sys.exit(f"{path}:{number}: not `NAME SECONDS[ alone]: COMMAND`: {line}")
        steps.append(
            Step(match["name"], float(match["seconds"]), bool(match["alone"]), match["command"])
        )
    return steps


class Lease:
    """The time that there is, and what runs in it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out, self.done, self.at_once = options.out, options.done, options.at_once
        self.began = time.monotonic()
        self.end = self.began + options.seconds
        self.running: list[Running] = []
        self.environment = {**os.environ, "OUT": str(options.out), "PYTHONUNBUFFERED": "1"}
        self.out.mkdir(parents=True, exist_ok=True)
        self.done.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def run(self, steps: list[Step]) -> None:
        for step in steps:
            if (self.done / step.name).exists():
                self.say(f"{step.name}: done before")
                continue
            self._wait_until(lambda step=step: self._fits(step))
            left = self.end - time.monotonic()
            if left < step.seconds / 2:
                self.say(f"{step.name}: not begun, {left:.0f} s are left of {step.seconds:.0f}")
                continue
            self._begin(step)
        self._wait_until(lambda: not self.running)

    def _fits(self, step: Step) -> bool:
        if step.alone or any(one.step.alone for one in self.running):
            return not self.running
        return len(self.running) < self.at_once

    def _begin(self, step: Step) -> None:
        self.say(f"{step.name}: {step.command}")
        with (self.out / f"{step.name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", step.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        until = min(time.monotonic() + step.seconds, self.end)
        self.running.append(Running(step, process, until))

    def _wait_until(self, free: Callable[[], bool]) -> None:
        while not free():
            time.sleep(POLL)
            for one in [*self.running]:
                one.enforce()
                if one.process.poll() is not None:
                    self.running.remove(one)
                    self._tell(one)

    def _tell(self, one: Running) -> None:
        code, seconds = one.process.returncode, time.monotonic() - one.began
        why = ", out of time" if one.interrupted else ""
        self.say(f"{one.step.name}: ended with {code} after {seconds:.0f} s{why}")
        if code == 0:
            (self.done / one.step.name).touch()
            return
        last = (self.out / f"{one.step.name}.log").read_text("utf-8", "replace").splitlines()
        print(*(f"    {line[:200]}" for line in last[-6:]), sep="\n", flush=True)


def pack(out: Path, results: Path) -> None:
    """Everything in one file."""
    with tarfile.open(out / KEPT, "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if path.name != KEPT:
                archive.add(path, path.name)
        archive.add(results, "results")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--done", type=Path, default=Path("out/lease-done"))
    parser.add_argument("--results", type=Path, default=Path("out/results"))
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    steps = read_plan(options.plan)
    lease = Lease(options)
    try:
        lease.run(steps)
    finally:
        for one in lease.running:
            one.signal(signal.SIGINT)
        pack(options.out, options.results)


if __name__ == "__main__":
    main()
