"""Soft permutations: doubly stochastic matrices, and hardening them to permutations."""

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
MIN_ENTRY = 1e-9  # before the logarithm: a zero could never grow
TOLERANCE = 1e-6  # of column sums
MATRIX = "matrix"  # component name


def sinkhorn(latent: Float[Tensor, "*batch n n"], times: int) -> Float[Tensor, "*batch n n"]:
    """Exponentiate, then normalise rows and columns in turn: columns sum to one, rows nearly.

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
    """Initial latent matrices: the logarithm of the identity plus noise."""
    widest = 2 * noise * math.sqrt(3) * math.sqrt(2 / (size + size))
    return (
        (
            torch.eye(size, dtype=torch.float64)
            + uniform(generator, (*batch, size, size), 0.0, widest)
        )
        .clamp_min(MIN_ENTRY)
        .log()
    )


@final
@dataclass(frozen=True)
class SoftPermutation(Group):
    """Mixes coordinates: new = matrix old, in every role.

    NOT A SYMMETRY unless the matrix is a permutation, and no group: mixing cannot be undone.
    """

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
        # Row sums come only as close to one as the number of normalisations allows.
        ok = bool((matrix >= 0).all()) and bool(((matrix.sum(-2) - 1).abs() <= TOLERANCE).all())
        return Check(ok, "" if ok else "an entry is negative, or a column does not sum to one")

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        return {MATRIX: one_hot(assign(total(write, read, ride)))}


def one_hot(index: Tensor) -> Tensor:
    """Permutations as matrices: new[i] = old[index[i]]."""
    return nn.functional.one_hot(index, index.shape[-1]).double()


def soft_table(table: Spec, spaces: Iterable[str]) -> Spec:
    """The table in which these spaces may mix, and nothing else moves."""
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
    """The soft end of a solution: B moved to the start of learning, then mixed. Lazy.

    NOT the function of B. `solution` is what `SoftMatching` found for this `b`.
    """
    soft = solution.relaxed
    if soft is None:
        raise MismatchError(
            "this solution has no soft end: only SoftMatching finds one; apply its alignment"
        )
    # Bases inside heads belong to the order of heads that mixing started from. So hardening is
    # undone first; between permutations that is exact.
    start = hardened(soft, b.spec).inverse().compose(solution.alignment)
    moved = replace(apply(start, b), spec=soft.spec)
    return replace(apply(soft, moved), spec=b.spec)
