"""What a group is: seven verbs over elements that are dictionaries of tensors, so that they batch, move and save alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.errors import SymmetryError
from symmerge.symmetry.notation import Role

Element = Mapping[str, Tensor]
"""One element, or a batch of them along leading dimensions: the parts of a group by name, for example ``{"index": ...}``."""


class Check(NamedTuple):
    """Whether an element belongs to its group, and if not, why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Gram:
    """Evidence for one role of a space: how A's coordinates meet B's (`cross` = A B') and B's meet themselves (`right` = B B').

    Groups whose elements are their own inverse transpose need `cross` only.
    """

    cross: Float[Tensor, "*batch n n"]
    right: Float[Tensor, "*batch n n"] | None = None

    @staticmethod
    def of(a: Float[Tensor, "*batch n m"], b: Float[Tensor, "*batch n m"]) -> Gram:
        """From the coordinates themselves, in float64."""
        a, b = a.double(), b.double()
        return Gram(a @ b.mT, b @ b.mT)

    def __add__(self, other: Gram) -> Gram:
        right = None if self.right is None or other.right is None else self.right + other.right
        return Gram(self.cross + other.cross, right)

    def add_(self, other: Gram) -> None:
        """The same in place: evidence for thousands of units is large."""
        self.cross.add_(other.cross)
        if self.right is not None and other.right is not None:
            self.right.add_(other.right)

    def needs_right(self) -> Tensor:
        """`right`, where a group cannot do without it."""
        if self.right is None:
            raise SymmetryError(
                "this group also needs the Gram matrix of B with itself: pass Gram(cross, right)"
            )
        return self.right


class Group(ABC):
    """The symmetry group of a space of `size` coordinates. Subclasses are final; elements may carry leading batch dimensions."""

    size: int

    @property
    def name(self) -> str:
        """What tables and files call this group."""
        return type(self).__name__

    @property
    def dimension(self) -> int:
        """Continuous degrees of freedom."""
        return 0

    @property
    def log10_order(self) -> float:
        """How many elements the discrete part has, as a power of ten."""
        return 0.0

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parts of one element and their shapes."""

    @abstractmethod
    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        """The element that changes nothing."""

    @abstractmethod
    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        """A well-conditioned random element."""

    @abstractmethod
    def compose(self, outer: Element, inner: Element) -> Element:
        """First `inner`, then `outer`."""

    @abstractmethod
    def inverse(self, element: Element) -> Element:
        """The element that undoes this one."""

    @abstractmethod
    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        """Move the coordinates of `x` (second to last axis) as `role` says."""

    @abstractmethod
    def check(self, element: Element) -> Check:
        """Is this an element of the group, to rounding?"""

    @abstractmethod
    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        """The element that brings B's coordinates closest to A's, given the evidence of the axes that write, read and ride."""

    def tangent(self) -> dict[str, tuple[int, ...]]:
        """The directions in which elements can move continuously, and their shapes; a discrete group has none."""
        return {}

    def start(self, batch: tuple[int, ...] = ()) -> Element:
        """The identity as a long walk begins with it: without what no step moves, and with what acting would have to compute anew after each step."""
        return self.identity(batch)

    def retract(self, element: Element, along: Mapping[str, Tensor]) -> Element:
        """The element moved along its tangent: differentiable, always in the group, and zero moves nothing."""
        return element

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        """The gradient of a loss along each part of the tangent.

        Each argument is the sum over the tensors that meet the space in a role of (gradient of the loss by the moved tensor) times (the moved tensor)':
        the cross Gram matrix of a gradient step, as `nearest` gets that of two models. What rides along follows permutations alone, and is not asked.
        """
        return {}

    def project(self, element: Element) -> tuple[Element, int]:
        """The element with what rounding or a long walk has done to it put right, and how many of its parts were so bad that they had to be changed."""
        return element, 0

    def check_shapes(self, element: Element, batch: tuple[int, ...] = ()) -> Check:
        """Does the element have this group's parts, finite and of the right shape?"""
        expected = {part: (*batch, *shape) for part, shape in self.shapes().items()}
        found = {part: tuple(value.shape) for part, value in element.items()}
        if expected != found:
            return Check(False, f"{self.name}({self.size}) expects parts {expected}, found {found}")
        bad = [
            part
            for part, value in element.items()
            if value.is_floating_point() and not value.isfinite().all()
        ]
        return Check(not bad, f"not finite: {', '.join(bad)}" if bad else "")


@final
@dataclass(frozen=True)
class Trivial(Group):
    """Only the identity: the space is visible from outside (vocabulary, positions, pixels, labels)."""

    size: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        return {}

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        return {}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {}

    def inverse(self, element: Element) -> Element:
        return {}

    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        return x

    def check(self, element: Element) -> Check:
        return self.check_shapes(element)

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        return {}


def total(write: Gram, *others: Gram | None) -> Tensor:
    """The evidence of several roles, for groups in which an element acts alike in all of them."""
    return sum((other.cross for other in others if other is not None), write.cross)


def is_transposed(x: Tensor) -> bool:
    """Whether a transposed matrix is seen: work along its rows then, so that no transposed copy is made."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def uniform(
    generator: torch.Generator, shape: tuple[int, ...], low: float | int, high: float | int
) -> Tensor:
    """Float64 numbers in [low, high)."""
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Float64 standard normal numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)
