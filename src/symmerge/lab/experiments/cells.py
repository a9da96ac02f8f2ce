"""A cell: one step of an experiment, with all that its result depends on. Equal cells have equal keys, so nothing is computed twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

Result = dict[str, Any]
"""What a step found, as JSON: no times, no places, so that it is the same wherever it was computed."""


class Step(Protocol):
    """Does the work of a cell: reads the folders of the cells it needs, writes files into its own, and returns what it found."""

    def __call__(
        self,
        settings: Mapping[str, Any],
        needs: list[Path],
        folder: Path,
        say: Callable[[str], None],
    ) -> Result: ...


@dataclass(frozen=True)
class Cost:
    """What a cell is expected to take. `heavy`: it keeps a GPU busy by itself, so few are computed at once there."""

    seconds: float = 0.0
    gigabytes: float = 0.0
    heavy: bool = False


@dataclass(frozen=True, eq=False)
class Cell:
    """`step` is where its function is found (`module:function`), `settings` all that the result depends on besides the cells it needs.

    `beside` is what the step is told besides and its result does not depend on (where data lies), `label` is for people, `cost` a guess: none is part of the
    key. The `VERSION` of a step's module is, where it has one: raise it when results change.
    """

    step: str
    settings: Mapping[str, Any]
    needs: tuple[Cell, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    cost: Cost = Cost()

    @cached_property
    def key(self) -> str:
        content = {
            "step": self.step,
            "version": self._version,
            "settings": self.settings,
            "needs": [need.key for need in self.needs],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def _version(self) -> int:
        return getattr(import_module(self.step.partition(":")[0]), "VERSION", 0)

    def work(self, needs: list[Path], folder: Path, say: Callable[[str], None]) -> Result:
        """Do it: `needs` are the folders of the cells it needs, `folder` its own."""
        module, _, name = self.step.partition(":")
        step: Step = getattr(import_module(module), name)
        return step({**self.settings, **self.beside}, needs, folder, say)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def with_needs(cells: Iterable[Cell]) -> list[Cell]:
    """All that must be computed for some cells, each once, what is needed before what needs it."""
    found: dict[str, Cell] = {}

    def visit(cell: Cell) -> Iterator[Cell]:
        if cell.key not in found:
            for need in cell.needs:
                yield from visit(need)
            found[cell.key] = cell
            yield cell

    return [cell for wanted in cells for cell in visit(wanted)]
