"""`Group`, the interface of every symmetry group, and `Gram`, the evidence solvers pass to it.

An element is a dictionary of tensors, so that elements can be batched and saved.
"""

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

Shape = tuple[int, ...]
Coordinates = Float[Tensor, "*batch n m"]
"""m column vectors in a space of n dimensions."""
Element = Mapping[str, Tensor]
"""One element, or a batch along leading dimensions, by component: ``{"index": ...}``."""
Tangent = Mapping[str, Tensor]
"""A tangent vector at an element, or a batch of them, by component: ``{"turn": ...}``."""


class Check(NamedTuple):
    """Whether an element belongs to its group, and if not, why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Gram:
    """Evidence for one role of a space: Gram matrices of A with B, and of B with itself.

    `cross` is A B', `right` is B B' (' is the transpose). Groups of orthogonal matrices, such as
    permutations, need only `cross`; scaled permutations also `squares`, the diagonal of `right`.
    """

    cross: Float[Tensor, "*batch n n"]
    right: Float[Tensor, "*batch n n"] | None = None
    squares: Float[Tensor, "*batch n"] | None = None

    @staticmethod
    def of(a: Coordinates, b: Coordinates) -> Gram:
        """Computed from the coordinates, in float64."""
        a, b = a.double(), b.double()
        return Gram(a @ b.mT, b @ b.mT)

    def __add__(self, other: Gram) -> Gram:
        right = None if self.right is None or other.right is None else self.right + other.right
        partial = self.squares is None or other.squares is None
        squares = None if partial else self.squares + other.squares  # pyright: ignore
        return Gram(self.cross + other.cross, right, squares)

    def add_(self, other: Gram) -> None:
        """Add in place, because Gram matrices of thousands of units are large."""
        self.cross.add_(other.cross)
        if self.right is not None and other.right is not None:
            self.right.add_(other.right)
        if self.squares is not None and other.squares is not None:
            self.squares.add_(other.squares)

    def needs_right(self) -> Tensor:
        """`right`, or an error: for groups that cannot do without it."""
        if self.right is None:
            raise SymmetryError("this group also needs B B': pass Gram(cross, right)")
        return self.right

    def needs_squares(self) -> Float[Tensor, "*batch n"]:
        """Squared norms of B's coordinates, or an error."""
        if self.squares is not None:
            return self.squares
        return self.needs_right().diagonal(dim1=-2, dim2=-1)


class Group(ABC):
    """The symmetry group of a space of `size` coordinates. Subclasses are final.

    The laws, which tests/symmetry/groups checks for every group (e, f, g are elements):

    | law | |
    |---|---|
    | identity, inverse | `compose(g, identity) = g`, `compose(g, inverse(g)) = identity` |
    | associativity | `compose(e, compose(f, g)) = compose(compose(e, f), g)` |
    | action | `act(compose(f, g), x) = act(f, act(g, x))`, linear in `x` |
    | invariance | what readers see is unchanged: `act(g, x, WRITES)' act(g, y, READS) = x' y` |
    | retraction | `retract(g, 0) = g`, and `retract(g, v)` is in the group |
    | gradient | `tangent_gradient` is the derivative of a loss along `retract` |
    | projection | `project(g) = g`, to rounding, for a well-conditioned g |
    """

    size: int

    @property
    def name(self) -> str:
        """The name of this group in tables and files."""
        return type(self).__name__

    @property
    def dimension(self) -> int:
        """Continuous degrees of freedom."""
        return 0

    @property
    def log10_order(self) -> float:
        """log10 of the number of elements of the discrete part."""
        return 0.0

    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """The components of one element and their shapes."""

    @abstractmethod
    def identity(self, batch: Shape = ()) -> Element:
        """The element that changes nothing."""

    @abstractmethod
    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        """A well-conditioned random element."""

    @abstractmethod
    def compose(self, outer: Element, inner: Element) -> Element:
        """First `inner`, then `outer`."""

    @abstractmethod
    def inverse(self, element: Element) -> Element:
        """The element that undoes this one."""

    @abstractmethod
    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        """Transform `x` along its second-to-last axis, in the given role."""

    @abstractmethod
    def check(self, element: Element) -> Check:
        """Whether this is an element of the group, to rounding."""

    @abstractmethod
    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        """The element that brings B closest to A, given the Gram matrices of each role."""

    def tangent(self) -> dict[str, Shape]:
        """The components of a tangent vector and their shapes; none for a discrete group."""
        return {}

    def start(self, batch: Shape = ()) -> Element:
        """Identity for the learner: no discrete components, inverse transpose cached."""
        return self.identity(batch)

    def retract(self, element: Element, tangent: Tangent) -> Element:
        """Move an element along a tangent vector; differentiable."""
        return element

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        """Gradient of a loss with respect to each tangent component, at zero.

        `write` and `read` are sums over the tensors that meet the space in that role: the gradient
        by the transformed tensor, times that tensor transposed. This is the cross Gram matrix with
        the gradient in place of A. Riding axes follow permutations only and do not contribute.
        """
        return {}

    def project(self, element: Element) -> tuple[Element, int]:
        """The element without rounding errors, and how many were too ill-conditioned to keep."""
        return element, 0

    def check_shapes(self, element: Element, batch: Shape = ()) -> Check:
        """Whether the element has this group's components, finite and of the right shape."""
        expected = {name: (*batch, *shape) for name, shape in self.shapes().items()}
        actual = {name: tuple(value.shape) for name, value in element.items()}
        if expected != actual:
            return Check(False, f"{self.name}({self.size}) expects {expected}, but has {actual}")
        bad = [
            name
            for name, value in element.items()
            if value.is_floating_point() and not value.isfinite().all()
        ]
        return Check(not bad, f"not finite: {', '.join(bad)}" if bad else "")


@final
@dataclass(frozen=True)
class Trivial(Group):
    """Only the identity: the space is visible from outside (vocabulary, positions, labels)."""

    size: int

    def shapes(self) -> dict[str, Shape]:
        return {}

    def identity(self, batch: Shape = ()) -> Element:
        return {}

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        return {}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {}

    def inverse(self, element: Element) -> Element:
        return {}

    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        return x

    def check(self, element: Element) -> Check:
        return self.check_shapes(element)

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        return {}


def total(write: Gram, *others: Gram | None) -> Tensor:
    """Sum of the cross Gram matrices, for groups that act the same in every role."""
    return sum((other.cross for other in others if other is not None), write.cross)


def is_transposed(x: Tensor) -> bool:
    """Whether x is a transposed view: then work along its rows and avoid a copy."""
    return x.stride(-2) == 1 and x.stride(-1) != 1


def uniform(generator: torch.Generator, shape: Shape, low: float, high: float) -> Tensor:
    """Float64 numbers in [low, high)."""
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def normal(generator: torch.Generator, shape: Shape) -> Tensor:
    """Float64 standard normal numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)
