"""Compute cells in the order of their needs, as many at once as an engine can; what fails is tried again, then reported."""

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
"""Called with a cell, what has become of it, and more about that in words."""


@dataclass(frozen=True)
class RunOutcome:
    """Results and reasons of failures by key; every cell that was asked for is in one of them."""

    results: dict[str, Result]
    failed: dict[str, str]
    computed: int
    reused: int


def missing(cells: Iterable[Cell], store: Store) -> list[Cell]:
    """Cells that have to be computed, in an order in which they can be: what only finished cells need is not among them."""
    cells = list(cells)
    wanted, found = {cell.key for cell in cells}, []
    for cell in reversed(with_needs(cells)):
        if cell.key in wanted and not store.done(cell):
            found.append(cell)
            wanted.update(need.key for need in cell.needs)
    return found[::-1]


def finished(cells: Iterable[Cell], store: Store) -> RunOutcome:
    """What there is so far; nothing is computed."""
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
    """Compute cells and all they need. An interrupt ends the workers and is passed on; what is finished stays finished."""
    cells = list(cells)
    with store.locked():
        work = _Work(missing(cells, store), attempts, store, report)
        if work.waiting:
            engine.open(store, lambda cell, line: report(cell, "said", line))
            try:
                work.through(engine)
            finally:
                with deferred_interrupts():
                    engine.close()
                    store.sweep()
        found = finished(cells, store)
        return replace(
            found, failed=work.failed, computed=work.computed, reused=found.reused - work.computed
        )


class _Work:
    """What is still to be done, and what has become of the rest."""

    def __init__(self, cells: list[Cell], attempts: int, store: Store, report: Report) -> None:
        self.waiting = {cell.key: cell for cell in cells}
        self.failed: dict[str, str] = {}
        self.computed = 0
        self._running: dict[str, Cell] = {}
        self._tries: Counter[str] = Counter()
        self._attempts, self._store, self._report = attempts, store, report

    def through(self, engine: Engine) -> None:
        while self.waiting or self._running:
            while cell := self._next(engine):
                self._running[cell.key] = self.waiting.pop(cell.key)
                self._tries[cell.key] += 1
                self._report(cell, "started", "")
                engine.start(cell)
            for ended in engine.wait():
                self._settle(ended)

    def _next(self, engine: Engine) -> Cell | None:
        """Of the cells that have all they need, and for which there is room, the first of the longest: what is short fills the gaps at the end."""
        if len(self._running) >= engine.workers:
            return None
        unfinished = self.waiting.keys() | self._running.keys()
        full = sum(cell.cost.heavy for cell in self._running.values()) >= engine.heavy
        ready = (
            cell
            for cell in self.waiting.values()
            if not any(need.key in unfinished for need in cell.needs)
        )
        return max(
            (cell for cell in ready if not (full and cell.cost.heavy)),
            key=lambda cell: cell.cost.seconds,
            default=None,
        )

    def _settle(self, ended: AttemptResult) -> None:
        cell = self._running.pop(ended.cell.key)
        if not ended.problem:
            self.computed += 1
            if ended.taken:
                self._store.record(ended.taken)
            self._report(cell, "computed", "")
            return
        self._store.log(cell, ended.details or ended.problem)
        if ended.again and self._tries[cell.key] < self._attempts:
            self.waiting = {cell.key: cell, **self.waiting}
            self._report(cell, "again", ended.problem)
        else:
            self._fail(cell, ended.problem)

    def _fail(self, cell: Cell, reason: str) -> None:
        self.failed[cell.key] = reason
        self._report(cell, "failed", reason)
        for other in [other for other in self.waiting.values() if cell in other.needs]:
            if self.waiting.pop(other.key, None):
                self._fail(
                    other,
                    f"not computed, because it needs '{cell.label or cell.key}', which failed",
                )
