"""Run many cases, a few at a time; count outcomes; keep what was unclean."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.cases import Case, act, concluded, prepare
from fuzz.judge import CLEAN, Outcome, Snapshot
from fuzz.sandbox import SECONDS, Child, ended, overdue, start


@dataclass(frozen=True)
class Running:
    """A case in a child."""

    case: Case
    child: Child
    before: Snapshot


@dataclass
class Tally:
    """Outcomes by format, and the unclean ones by where they happened."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    unclean: dict[tuple[str, str, str], list[tuple[Case, Outcome]]] = field(default_factory=dict)

    def add(self, case: Case, outcome: Outcome) -> None:
        self.counts.setdefault(case.of.format, Counter())[outcome.kind] += 1
        if not outcome.clean:
            # without a line of ours, the same verb and message count as the same
            where = outcome.where or f"{case.command[0]}: {outcome.said[:60]}"
            key = (outcome.kind, where, case.of.format if not outcome.where else "")
            self.unclean.setdefault(key, []).append((case, outcome))

    @property
    def cases(self) -> int:
        return sum(sum(counts.values()) for counts in self.counts.values())

    def table(self) -> Iterator[str]:
        """A line per format, and the sum."""
        dirty = {kind for counts in self.counts.values() for kind in counts} - {*CLEAN}
        kinds = [*CLEAN, *sorted(dirty)]
        yield "\t".join(["format".ljust(10), "cases", *kinds])
        total: Counter[str] = Counter()
        for name, counts in sorted(self.counts.items()):
            total += counts
            yield _row(name, counts, kinds)
        yield _row("all", total, kinds)


def _row(name: str, counts: Counter[str], kinds: Iterable[str]) -> str:
    return "\t".join([name.ljust(10), str(sum(counts.values())), *(str(counts[k]) for k in kinds)])


def run_cases(
    cases: Iterable[Case],
    samples: Path,
    work: Path,
    *,
    jobs: int = 2,
    seconds: float = SECONDS,
    tell: Callable[[Case, Outcome], None] = lambda case, outcome: None,
) -> Tally:
    """Every case in a child of its own."""
    tally, running = Tally(), {}
    for number, case in enumerate(cases):
        while len(running) >= jobs:
            _collect(running, tally, seconds, tell)
        one = _begin(case, samples, work / f"{number:05}", seconds)
        running[one.child.process] = one
    while running:
        _collect(running, tally, seconds, tell)
    return tally


def _begin(case: Case, samples: Path, folder: Path, seconds: float) -> Running:
    before = prepare(case, samples, folder)
    return Running(case, start(lambda: act(case), folder, seconds), before)


def _collect(
    running: dict[int, Running],
    tally: Tally,
    seconds: float,
    tell: Callable[[Case, Outcome], None],
) -> None:
    """Wait until a child ends, and judge it."""
    process, status, usage = os.wait4(-1, os.WNOHANG)
    if not process:
        for one in running.values():
            overdue(one.child, seconds)
        time.sleep(0.005)
        return
    one = running.pop(process)
    result = ended(one.child, status, usage.ru_utime + usage.ru_stime)
    outcome = concluded(one.case, one.child.folder, one.before, result)
    tally.add(one.case, outcome)
    tell(one.case, outcome)
    shutil.rmtree(one.child.folder, ignore_errors=True)
