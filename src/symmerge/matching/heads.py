"""Match attention heads: which head meets which, and inside each pair the best basis.

Two stages over all pairs of heads at once. Inside a pair: the basis of queries and keys, the basis of values, and (grouped heads) which
query head meets which, each given the others. Between pairs: assignment by what the best inside leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.groups import Element, GeneralLinear, Gram, Group, Orthogonal, Permutation
from symmerge.groups.monomial import assign
from symmerge.notation import Role
from symmerge.spec import Occurrence, Spec

Sides = Callable[[Occurrence], tuple[Tensor, Tensor]]
"""Both models' views of a piece, weighted, with B moved in every space but those of the heads."""


@dataclass(frozen=True)
class Heads:
    """The spaces of one attention layer: the heads, the query heads inside each (if grouped), and the bases."""

    outer: str
    queries: str | None
    bases: tuple[str, ...]

    @property
    def spaces(self) -> tuple[str, ...]:
        return (self.outer, *((self.queries,) if self.queries else ()), *self.bases)


def layers(spec: Spec) -> list[Heads]:
    """Every attention layer of a table: a permutation space that others are `per`."""
    found = []
    for outer in dict.fromkeys(space.per for space in spec.hidden.values() if space.per):
        inner = [space for space in spec.hidden.values() if space.per == outer]
        queries = next((space.name for space in inner if isinstance(space.group, Permutation)), None)
        found.append(Heads(outer, queries, tuple(space.name for space in inner if space.name != queries)))
    return found


@dataclass(frozen=True)
class _Crossed:
    """Gram matrices between all heads of A (a) and of B (b), and between their query heads (p, q); one query where there is none."""

    cross: Float[Tensor, "a b p q n n"]
    right: Float[Tensor, "b q n n"]


def _crossed(sides: Sides, met: Occurrence, heads: Heads) -> _Crossed:
    atoms = [atom.space for atom in met.piece.atoms]
    front = [atoms.index(heads.outer)] + ([atoms.index(heads.queries)] if heads.queries in atoms else []) + [met.position]
    a, b = (_front(view, front, heads.queries in atoms) for view in sides(met))
    return _Crossed(torch.einsum("apnm,bqkm->abpqnk", a, b), torch.einsum("bqnm,bqkm->bqnk", b, b))


def _front(view: Tensor, front: list[int], has_queries: bool) -> Tensor:
    """[head, query, n, rest]."""
    view = view.permute(*front, *(dim for dim in range(view.ndim) if dim not in front))
    view = view if has_queries else view.unsqueeze(1)
    return view.flatten(3) if view.ndim > 3 else view.unsqueeze(-1)


def match_heads(spec: Spec, heads: Heads, sides: Sides, *, general: bool = True, rounds: int = 4) -> dict[str, Element]:
    """The elements of one attention layer that bring B's heads closest to A's."""
    evidence = {
        (base, role): [_crossed(sides, met, heads) for met in spec.occurrences(base) if met.role is role]
        for base in heads.bases
        for role in (Role.WRITES, Role.READS)
    }
    groups = {base: _inside(spec.spaces[base].group) for base in heads.bases}
    order, score = _pairs(evidence, groups, heads, rounds)
    place = assign(score)
    index = torch.arange(len(place))
    found: dict[str, Element] = {heads.outer: {"index": place}}
    if heads.queries:
        found[heads.queries] = {"index": order[index, place].cpu()}
    for base in heads.bases:
        group = spec.spaces[base].group if general else groups[base]
        write, read = (_gram(evidence[base, role], order, (index, place)) for role in (Role.WRITES, Role.READS))
        found[base] = group.nearest(write, read)
    return found


def _inside(group: Group) -> Group:
    """While scoring pairs, rotations stand for every basis: in the balanced gauge they lose little and cost one SVD."""
    return Orthogonal(group.size) if isinstance(group, GeneralLinear) else group


def _pairs(evidence, groups, heads: Heads, rounds: int) -> tuple[Tensor, Tensor]:
    """For every pair of heads: the best order of its query heads, and what the best elements then gain."""
    first = next(iter(evidence.values()))[0].cross
    count = max(item.cross.shape[2] for items in evidence.values() for item in items)
    order = torch.arange(count, device=first.device).expand(*first.shape[:2], count).clone()
    score = torch.zeros(first.shape[:2], device=first.device, dtype=first.dtype)
    for _ in range(rounds if heads.queries else 1):
        score, options = torch.zeros_like(score), torch.zeros(*first.shape[:2], count, count, device=first.device, dtype=first.dtype)
        for base, group in groups.items():
            write, read = (_gram(evidence[base, role], order) for role in (Role.WRITES, Role.READS))
            element = group.nearest(write, read)
            for role, gram in ((Role.WRITES, write), (Role.READS, read)):
                score += _gain(group, element, role, gram)
                for item in evidence[base, role]:
                    if item.cross.shape[2] > 1:
                        options += _inner(group, element, role, item.cross)
        if heads.queries:
            order = assign(options).to(first.device)
    return order, score


def _matrix(group: Group, element: Element, role: Role, like: Tensor) -> Tensor:
    batch = next(iter(element.values())).shape[: like.ndim - 2]
    return group.act(element, torch.eye(group.size).to(like).expand(*batch, -1, -1), role)


def _gain(group: Group, element: Element, role: Role, gram: Gram) -> Tensor:
    """How much closer than nothing: 2 <A, gB> - |gB|^2."""
    matrix = _matrix(group, element, role, gram.cross)
    return ((2 * gram.cross - matrix @ gram.needs_right()) * matrix).sum((-2, -1))


def _inner(group: Group, element: Element, role: Role, cross: Tensor) -> Tensor:
    matrix = _matrix(group, element, role, cross[:, :, 0, 0])
    return (cross * matrix[:, :, None, None]).sum((-2, -1))


def _gram(items: list[_Crossed], order: Tensor, pairs: tuple[Tensor, Tensor] | None = None) -> Gram:
    """The evidence of a role with B's query heads in order, for all pairs of heads or for some."""
    cross, right = torch.zeros(()), torch.zeros(())
    for item in items:
        met = item.cross
        if met.shape[2] > 1:
            picked = order[:, :, :, None, None, None].expand(*order.shape, 1, *met.shape[-2:])
            met = met.gather(3, picked)
        cross = cross.to(met) + met.sum((2, 3)) if met.shape[2] > 1 else cross.to(met) + met[:, :, 0, 0]
        right = right.to(met) + item.right.sum(1)[None]
    right = right.expand_as(cross)
    if pairs is None:
        return Gram(cross, right)
    return Gram(cross[pairs], right[pairs])
