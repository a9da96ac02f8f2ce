"""Alignment while every core is busy with something else, against the same with idle cores.

Each solve is a process of its own: alone, beside one endless loop per core, and so on in turns; the
best of each kind counts. Beside one loop per core a single thread gets half to two thirds of a
core, so about 2 is what any program pays. What exceeds it is spinning and waiting for threads.
The first row is the control: torch with all its threads, SVDs of small matrices.

    python benchmarks/busy.py A B [--runs 2]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "busy.json"
ALLOWED = 3.0
CLOCK = """
import os, sys, time
def timed(function, *arguments):
    began, before = time.perf_counter(), os.times()
    function(*arguments)
    after = os.times()
    print(time.perf_counter() - began, sum(after[:2]) - sum(before[:2]))
"""
SOLVE = """
import symmerge as sm
from symmerge.matching.recipes import get_recipe
a, b = (sm.load(path) for path in sys.argv[1:3])
timed(sm.align, a, b, get_recipe(sys.argv[3]))
"""
LEARN = """
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # as the command line does
import symmerge as sm
from symmerge.matching.efforts import effort_recipe
from symmerge.matching.recipes import with_options
a, b = (sm.load(path) for path in sys.argv[1:3])
timed(sm.align, a, b, with_options(effort_recipe(sys.argv[3], a), steps=10, generated=32))
"""
CONTROL = """
import torch
def decompose():
    for _ in range(6):
        torch.linalg.svd(torch.randn(144, 64, 64))
timed(decompose)
"""
JOBS = {
    "control: torch with all threads": (CONTROL, ""),
    "weights-only": (SOLVE, "weights-only"),
    "orthogonal, 15 sweeps": (SOLVE, "orthogonal"),
    "standard effort, 10 steps": (LEARN, "standard"),
}


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many endless loops beside what runs inside."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run(job: str, pair: list[str]) -> tuple[float, float]:
    """Seconds, and seconds of processors, of a solve in a process of its own."""
    program, recipe = JOBS[job]
    command = [sys.executable, "-c", CLOCK + program, *pair, recipe]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, processors = map(float, output.split()[-2:])
    return seconds, processors


def measure(job: str, pair: list[str], runs: int) -> dict[str, Any]:
    """One row of the result."""
    alone, beside = [], []
    for _ in range(runs):
        alone.append(run(job, pair))
        with busy(os.cpu_count() or 1):
            beside.append(run(job, pair))
    (idle, work), (loaded, more_work) = min(alone), min(beside)
    return {
        "job": job,
        "idle_s": round(idle, 2),
        "busy_s": round(loaded, 2),
        "ratio": round(loaded / idle, 2),
        "processor_s": [round(work, 2), round(more_work, 2)],
        "allowed": ALLOWED,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", nargs=2)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for job in JOBS:
        rows.append(measure(job, options.pair, options.runs))
        print(json.dumps(rows[-1]), flush=True)
    machine = {"cores": os.cpu_count(), "load_before": os.getloadavg()[2]}
    machine |= {"machine": platform.machine(), "torch": version("torch")}
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
