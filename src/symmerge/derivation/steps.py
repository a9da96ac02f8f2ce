"""One operation while it is followed: its operands, and how axes of two of them meet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symmerge.derivation.following import (
    POINTWISE,
    Following,
    Mode,
    Site,
    State,
    constant_axes,
)
from symmerge.derivation.recording import Operation
from symmerge.derivation.terms import (
    Axis,
)
from symmerge.derivation.terms import Versions as Versions

Operand = State | Tensor | float | int | bool | None


@dataclass
class TracedStep:
    """One operation while it is followed."""

    walk: Following
    operation: Operation

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its first result."""
        result = self.operation.results[0]
        return result.shape if result else ()

    def settle(self, *operands: Operand) -> None:
        """These meet something that is not linear: no gain folds, no square is a length."""
        for one in operands:
            if isinstance(one, State):
                if one.site:
                    one.site.foldable = one.site.absorbable = False
                self.settle_square(one)

    def settle_linear(self, *operands: Operand) -> Site | None:
        """These are added or normed: a gain after an embedding may still be absorbed."""
        sites = [one.site for one in operands if isinstance(one, State) and one.site]
        kept = [site for site in sites if site.embedding and site.absorbable]
        for one in operands:
            if isinstance(one, State):
                self.settle_square(one)
        for site in sites:
            site.foldable = False
            site.absorbable = site.absorbable and len(kept) == 1
        return kept[0] if len(kept) == 1 else None

    def settle_square(self, one: State) -> None:
        """A square that is not summed is a function of single coordinates."""
        if one.square:
            for met in one.mets():
                self.walk.mark(met, POINTWISE)


def axes_of(operand: Operand) -> tuple[Axis, ...]:
    """The axes of a state or a constant."""
    if isinstance(operand, State):
        return operand.axes
    return constant_axes(operand) if isinstance(operand, Tensor) else ()


def matched(step: TracedStep, one: Operand, other: Operand, mode: Mode) -> tuple[Axis, ...]:
    """The axes of an elementwise operation on both, with broadcasting."""
    left, right = axes_of(one), axes_of(other)
    count = max(len(left), len(right))
    padded = [(((),) * (count - len(side)) + side) for side in (left, right)]
    return tuple(step.walk.match(a, b, mode) for a, b in zip(*padded, strict=True))
