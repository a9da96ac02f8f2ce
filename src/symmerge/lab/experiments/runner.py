"""Compute cells in parallel, dependencies first; failures are retried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from symmerge.lab.experiments.cells import Cell, Result, with_needs
from symmerge.lab.experiments.engines import AttemptResult, Engine, deferred_interrupts
from symmerge.lab.experiments.store import Store

State = Literal["started", "said", "computed", "again", "failed"]
Report = Callable[[Cell, State, str], None]
"""Called with a cell, its new state, and details for people."""


@dataclass(frozen=True)
class RunOutcome:
    """Results and reasons for failures, by key; every requested cell is in one of them."""

    results: dict[str, Result]
    failed: dict[str, str]
    computed: int
    reused: int


def missing(cells: Iterable[Cell], store: Store) -> list[Cell]:
    """Cells to compute, dependencies first. What only finished cells need is left out."""
    cells = list(cells)
    wanted, absent = {cell.key for cell in cells}, []
    for cell in reversed(with_needs(cells)):
        if cell.key in wanted and not store.done(cell):
            absent.append(cell)
            wanted.update(need.key for need in cell.needs)
    return absent[::-1]


def finished(cells: Iterable[Cell], store: Store) -> RunOutcome:
    """The results that exist; nothing is computed."""
    results = {cell.key: store.result(cell) for cell in with_needs(cells) if store.done(cell)}
    return RunOutcome(results, {}, 0, len(results))


def run(
    cells: Iterable[Cell],
    store: Store,
    engine: Engine,
    *,
    attempts: int = 3,
    report: Report = lambda cell, state, detail: None,
) -> RunOutcome:
    """Compute cells and all they need. An interrupt ends the workers; finished cells stay."""
    cells = list(cells)
    with store.locked():
        queue = _Queue(missing(cells, store), attempts, store, report)
        if queue.waiting:
            engine.open(store, lambda cell, line: report(cell, "said", line))
            try:
                queue.compute_all(engine)
            finally:
                with deferred_interrupts():
                    engine.close()
                    store.sweep()
        outcome = finished(cells, store)
        reused = outcome.reused - queue.computed
        return replace(outcome, failed=queue.failed, computed=queue.computed, reused=reused)


class _Queue:
    """Waiting and running cells, attempts, and failures."""

    def __init__(self, cells: list[Cell], attempts: int, store: Store, report: Report) -> None:
        self.waiting = {cell.key: cell for cell in cells}
        self.failed: dict[str, str] = {}
        self.computed = 0
        self._running: dict[str, Cell] = {}
        self._tries: Counter[str] = Counter()
        self._attempts, self._store, self._report = attempts, store, report

    def compute_all(self, engine: Engine) -> None:
        while self.waiting or self._running:
            while cell := self._next(engine):
                self._running[cell.key] = self.waiting.pop(cell.key)
                self._tries[cell.key] += 1
                self._report(cell, "started", "")
                engine.start(cell)
            for result in engine.wait():
                self._settle(result)

    def _next(self, engine: Engine) -> Cell | None:
        """The longest cell that is ready and fits; short ones fill the gaps at the end."""
        if len(self._running) >= engine.workers:
            return None
        unfinished = self.waiting.keys() | self._running.keys()
        full = sum(cell.cost.heavy for cell in self._running.values()) >= engine.heavy
        candidates = (
            cell
            for cell in self.waiting.values()
            if not (full and cell.cost.heavy)
            and not any(need.key in unfinished for need in cell.needs)
        )
        return max(candidates, key=lambda cell: cell.cost.seconds, default=None)

    def _settle(self, result: AttemptResult) -> None:
        cell = self._running.pop(result.cell.key)
        if not result.problem:
            self.computed += 1
            if result.usage:
                self._store.record(result.usage)
            self._report(cell, "computed", "")
            return
        self._store.log(cell, result.details or result.problem)
        if result.again and self._tries[cell.key] < self._attempts:
            self.waiting = {cell.key: cell, **self.waiting}
            self._report(cell, "again", result.problem)
        else:
            self._fail(cell, result.problem)

    def _fail(self, cell: Cell, reason: str) -> None:
        self.failed[cell.key] = reason
        self._report(cell, "failed", reason)
        reason = f"not computed, because it needs '{cell.label or cell.key}', which failed"
        for other in [other for other in self.waiting.values() if cell in other.needs]:
            if self.waiting.pop(other.key, None):
                self._fail(other, reason)
