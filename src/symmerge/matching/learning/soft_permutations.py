"""Soft permutations: doubly stochastic matrices, and the way back to permutations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symmerge.errors import MismatchError, SymmetryError
from symmerge.matching.base import Solution
from symmerge.models.alignment import Alignment, apply
from symmerge.models.model import Model
from symmerge.symmetry.groups import Element, Group, Trivial
from symmerge.symmetry.groups.base import Check, Gram, normal, total, uniform
from symmerge.symmetry.groups.indices import assign
from symmerge.symmetry.groups.matrices import multiply
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Space, Spec

SINKHORN = 20
LEAST = 1e-9  # of an entry before its logarithm: what is nothing at all could never grow
TOLERANCE = 1e-6  # how far rounding may leave the sums of columns from one
MATRIX, LATENT = "matrix", "latent"  # the parts of elements, learned and in journals


def sinkhorn(latent: Float[Tensor, "*batch n n"], times: int) -> Float[Tensor, "*batch n n"]:
    """The exponential, its rows and columns divided by their sums in turn: columns sum to one, rows the more nearly the more `times`.

    >>> sinkhorn(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), 1).sum(0)
    tensor([1., 1.])
    """
    for _ in range(times):
        latent = latent - latent.logsumexp(-1, keepdim=True)
        latent = latent - latent.logsumexp(-2, keepdim=True)
    return latent.exp()


def first_latent(
    size: int, batch: tuple[int, ...], noise: float, generator: torch.Generator
) -> Float[Tensor, "*batch n n"]:
    """The logarithm of the identity and some noise: where all is learned from."""
    widest = 2 * noise * math.sqrt(3) * math.sqrt(2 / (size + size))
    return (
        (
            torch.eye(size, dtype=torch.float64)
            + uniform(generator, (*batch, size, size), 0.0, widest)
        )
        .clamp_min(LEAST)
        .log()
    )


@final
@dataclass(frozen=True)
class SoftPermutation(Group):
    """Coordinates mix: new = matrix old, in every role. NO SYMMETRY but where the matrix is a permutation, and no group: a mixture cannot be undone."""

    size: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {MATRIX: (self.size, self.size)}

    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        return {MATRIX: torch.eye(self.size, dtype=torch.float64).expand(*batch, -1, -1).clone()}

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        return {MATRIX: sinkhorn(normal(generator, (*batch, self.size, self.size)), SINKHORN)}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {MATRIX: outer[MATRIX] @ inner[MATRIX]}

    def inverse(self, element: Element) -> Element:
        raise SymmetryError("a soft permutation cannot be undone: harden it first")

    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        return multiply(element[MATRIX], x)

    def check(self, element: Element) -> Check:
        matrix = element[MATRIX]
        # Rows are as near to one as the normalisations brought them, which is the method's own choice.
        ok = bool((matrix >= 0).all()) and bool(((matrix.sum(-2) - 1).abs() <= TOLERANCE).all())
        return Check(ok, "" if ok else "an entry is negative, or a column does not sum to one")

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        return {MATRIX: sharp(assign(total(write, read, ride)))}


def sharp(index: Tensor) -> Tensor:
    """Permutations as matrices: new[i] = old[index[i]]."""
    return nn.functional.one_hot(index, index.shape[-1]).double()


def soft_table(table: Spec, spaces: Iterable[str]) -> Spec:
    """The table in which these spaces mix, and nothing else moves."""
    soft = set(spaces)

    def changed(space: Space) -> Space:
        size = space.group.size
        return replace(space, group=SoftPermutation(size) if space.name in soft else Trivial(size))

    return replace(table, spaces={name: changed(space) for name, space in table.spaces.items()})


def hardened(relaxed: Alignment, table: Spec) -> Alignment:
    """The permutations nearest to soft ones: a symmetry of models with this table."""
    flips = {name: {"index": assign(element[MATRIX])} for name, element in relaxed.elements.items()}
    return Alignment(table, {**Alignment.identity(table).elements, **flips})


def relax(solution: Solution, b: Model) -> Model:
    """The soft end of a solution: B moved to where soft learning started, then mixed. NOT the function of B. Lazy.

    Preconditions: `solution` is what `SoftMatching` found for this `b`, in the form it was solved in.
    """
    soft = solution.relaxed
    if soft is None:
        raise MismatchError(
            "this solution has no soft end: only SoftMatching finds one; apply its alignment instead"
        )
    # Bases inside heads belong to the order of heads that mixing started from, so hardening is undone first; between permutations that is exact.
    start = hardened(soft, b.spec).inverse().compose(solution.alignment)
    moved = replace(apply(start, b), spec=soft.spec)
    return replace(apply(soft, moved), spec=b.spec)
