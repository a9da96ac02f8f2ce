"""A cell: one step of an experiment and all that its result depends on.

Equal cells have equal keys, so nothing is computed twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

Settings = Mapping[str, Any]
"""What a step reads, as JSON."""

Result = dict[str, Any]
"""What a step returns, as JSON: no times and no paths, so it is the same on every machine."""


class Step(Protocol):
    """The work of a cell: reads the folders of its needs, writes to its own, returns a result."""

    def __call__(
        self,
        settings: Settings,
        needs: list[Path],
        folder: Path,
        say: Callable[[str], None],
    ) -> Result: ...


@dataclass(frozen=True)
class Cost:
    """Expected cost. A `heavy` cell keeps a GPU busy by itself, so few of them run at once."""

    seconds: float = 0.0
    gigabytes: float = 0.0
    heavy: bool = False


@dataclass(frozen=True, eq=False)
class Cell:
    """A step (`module:function`), its settings, and the cells it needs.

    `beside` holds arguments that do not affect the result, such as paths; `label` is for people,
    `cost` is an estimate. None of these is part of the key, but the `VERSION` of the step's
    module is: raise it when results change.
    """

    step: str
    settings: Settings
    needs: tuple[Cell, ...] = ()
    beside: Settings = field(default_factory=dict)
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
        """Run the step: `needs` are the folders of the cells it needs, `folder` is its own."""
        module, _, name = self.step.partition(":")
        step: Step = getattr(import_module(module), name)
        return step({**self.settings, **self.beside}, needs, folder, say)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cell) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def with_needs(cells: Iterable[Cell]) -> list[Cell]:
    """The cells and all they need, each once, needs first."""
    visited: set[str] = set()

    def visit(cell: Cell) -> Iterator[Cell]:
        if cell.key not in visited:
            for need in cell.needs:
                yield from visit(need)
            visited.add(cell.key)
            yield cell

    return [cell for wanted in cells for cell in visit(wanted)]
