"""How a change is carried: the options of `transport`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from symmerge.aligning.choices import check_choice
from symmerge.errors import MismatchError
from symmerge.matching.efforts import EFFORTS


@final
@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """How a change is carried.

    `effort` says how OTHER is aligned to BASE and how long the way of carrying is learned;
    `method` is one of `align` (or "none") with nothing learned; `alignment` is a file of `align`.
    `scale` times the change; None: chosen where inputs can be made, else 1. `heal`: steps in which
    what arrived then learns TUNED's answers, in all weights or in an adapter's factors.
    """

    effort: str | None = None
    method: str | None = None
    alignment: Path | None = None
    scale: float | None = None
    data: str | None = None
    steps: int | None = None
    heal: int = 0
    untie: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_choice("--effort", self.effort, EFFORTS)
        if self.method and self.effort:
            raise MismatchError("--method and --effort: give one of them")
        if self.alignment and self.method:
            raise MismatchError("--alignment and --method: give one of them")
        if self.steps and not self.learns:
            raise MismatchError(
                "--steps: with --scale or --method nothing is learned; leave it out"
            )
        if self.effort and self.scale is not None:
            raise MismatchError("--effort and --scale: with --scale nothing is learned; give one")
        if self.heal < 0:
            raise MismatchError(f"--heal {self.heal}: give a number of steps")
        if self.scale is not None and not 0 < self.scale < 100:
            raise MismatchError(f"--scale {self.scale:g}: give a number above 0 and below 100")

    @property
    def learns(self) -> bool:
        """Whether the way of carrying is learned: with an effort, and without --scale."""
        return self.method is None and self.scale is None
