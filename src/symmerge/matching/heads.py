"""Match attention heads: which head meets which, and inside each pair the best basis.

Two stages over all pairs of heads at once. Inside a pair: the basis of queries and keys, the basis of values, and (grouped heads) which
query head meets which, each given the others. Between pairs: assignment by what the best inside leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.symmetry.groups import (
    Element,
    GeneralLinear,
    Gram,
    Group,
    Orthogonal,
    Permutation,
    linalg,
)
from symmerge.symmetry.groups.indices import assign
from symmerge.symmetry.groups.invertible import descend_invertible
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Occurrence, Spec

Sides = Callable[[Occurrence], tuple[Tensor, Tensor, float]]
"""Both models' views of a piece, with B moved in every space but those in question, and how much the piece counts."""


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
    """Every attention layer of a table: a space that others are `per`."""
    found = []
    for outer in dict.fromkeys(space.per for space in spec.hidden.values() if space.per):
        inner = [space.name for space in spec.hidden.values() if space.per == outer]
        queries = next(
            (
                name
                for name in inner
                if isinstance(spec.spaces[name].group, Permutation)
                and _holds_others(spec, name, inner)
            ),
            None,
        )
        found.append(Heads(outer, queries, tuple(name for name in inner if name != queries)))
    return found


def _holds_others(spec: Spec, name: str, inner: list[str]) -> bool:
    """Whether a space stands outside another of its layer in some tensor: query heads do, bases do not."""
    return any(
        atom.space in inner and atom.space != name
        for met in spec.occurrences(name)
        for atom in met.piece.atoms
    )


@dataclass(frozen=True)
class HeadOptions:
    """How heads are matched.

    `metric` scores a pair of heads: "best" by how close the best bases bring them, "frobenius" and "cosine" by their circuits as they are (no
    basis matters there), "spectrum" by the circuits' singular values. `inside` is how the bases of a pair are found: "rotation" in the balanced
    gauge, "general" (any invertible matrix, by Gauss-Newton) or "gradient" (the same by gradient descent). With `follow`, queries and keys are not
    looked at: they take the order found for the values (where both may only change places).
    """

    metric: Literal["best", "frobenius", "cosine", "spectrum"] = "best"
    inside: Literal["rotation", "general", "gradient"] = "rotation"
    follow: bool = False


@dataclass(frozen=True)
class _Crossed:
    """Gram matrices between all heads of A (a) and of B (b), and between their query heads (p, q); one query where there is none."""

    cross: Float[Tensor, "a b p q n n"]
    left: Float[Tensor, "a p n n"]
    right: Float[Tensor, "b q n n"]


def _crossed(sides: Sides, met: Occurrence, heads: Heads) -> _Crossed:
    atoms = [atom.space for atom in met.piece.atoms]
    front = (
        [atoms.index(heads.outer)]
        + ([atoms.index(heads.queries)] if heads.queries in atoms else [])
        + [met.position]
    )
    *views, scale = sides(met)
    a, b = (_front(view, front, heads.queries in atoms) for view in views)
    left, right = (
        torch.einsum("bqnm,bqkm->bqnk", side, side).double().mul_(scale) for side in (a, b)
    )
    return _Crossed(torch.einsum("apnm,bqkm->abpqnk", a, b).double().mul_(scale), left, right)


def _front(view: Tensor, front: list[int], has_queries: bool) -> Tensor:
    """[head, query, n, rest]."""
    view = view.permute(*front, *(dim for dim in range(view.ndim) if dim not in front))
    view = view if has_queries else view.unsqueeze(1)
    return view.flatten(3) if view.ndim > 3 else view.unsqueeze(-1)


def match_heads(
    spec: Spec, heads: Heads, sides: Sides, options: HeadOptions, *, rounds: int = 4
) -> dict[str, Element]:
    """The elements of one attention layer that bring B's heads closest to A's."""
    followers = {
        base for base in heads.bases if options.follow and spec.spaces[base].translation == "drops"
    }
    bases = [base for base in heads.bases if base not in followers]
    evidence = {
        (base, role): [
            _crossed(sides, met, heads) for met in spec.occurrences(base) if met.role is role
        ]
        for base in bases
        for role in (Role.WRITES, Role.READS)
    }
    groups = {base: _inside(spec.spaces[base].group) for base in bases}
    order, score = _pairs(evidence, groups, heads, rounds)
    if options.metric != "best":
        scores = [
            METRICS[options.metric](
                *(_circuit(evidence[base, role], order) for role in (Role.WRITES, Role.READS))
            )
            for base in bases
        ]
        score = torch.stack(scores).sum(0)
    moves = heads.outer in spec.hidden
    place = assign(score) if moves else torch.arange(spec.sizes[heads.outer])
    index = torch.arange(len(place))
    found: dict[str, Element] = {heads.outer: {"index": place}} if moves else {}
    if heads.queries:
        found[heads.queries] = {"index": order[index, place].cpu()}
    for base in bases:
        write, read = _grams(evidence, base, order, (index, place))
        found[base] = _basis(spec.spaces[base].group, groups[base], write, read, options)
    for base in followers:
        leader = (
            found[bases[0]]
            if spec.spaces[bases[0]].group == spec.spaces[base].group
            else spec.spaces[base].group.identity(spec.batch(base))
        )
        found[base] = {
            part: value.clone() for part, value in leader.items()
        }  # files of tensors hold no two names for one
    return found


def _basis(group: Group, inside: Group, write: Gram, read: Gram, options: HeadOptions) -> Element:
    if not isinstance(group, GeneralLinear) or options.inside == "rotation":
        return inside.nearest(write, read)
    if options.inside == "general":
        return group.nearest(write, read)
    return {"matrix": descend_invertible(inside.nearest(write, read)["matrix"], write, read)}


def _inside(group: Group) -> Group:
    """While scoring pairs, rotations stand for every basis: in the balanced gauge they lose little and cost one SVD."""
    return Orthogonal(group.size) if isinstance(group, GeneralLinear) else group


class _Circuit(NamedTuple):
    """One side's Gram matrices for all pairs of heads: A's own, A's with B's, B's own."""

    left: Tensor
    cross: Tensor
    right: Tensor


def _circuit(items: list[_Crossed], order: Tensor) -> _Circuit:
    gram = _gram(items, order)
    left = sum((item.left.sum(1) for item in items), torch.zeros(()).to(gram.cross))[:, None]
    return _Circuit(left.expand_as(gram.cross), gram.cross, gram.needs_right())


def _inner_products(write: _Circuit, read: _Circuit) -> tuple[Tensor, Tensor, Tensor]:
    """<A, A>, <A, B> and <B, B> of the circuits y'x, from thin factors: <y'x, v'u> = sum((y v') * (x u'))."""
    own, met, other = ((w * r).sum((-2, -1)) for w, r in zip(write, read, strict=True))
    return own, met, other


def _frobenius(write: _Circuit, read: _Circuit) -> Tensor:
    own, met, other = _inner_products(write, read)
    return -(own + other - 2 * met).clamp_min(0).sqrt()


def _cosine(write: _Circuit, read: _Circuit) -> Tensor:
    own, met, other = _inner_products(write, read)
    return met / (own * other).sqrt().clamp_min(1e-30)


def _spectrum(write: _Circuit, read: _Circuit) -> Tensor:
    """Less the distance between the circuits' singular values: the roots of the eigenvalues of (x x')(y y')."""
    own, other = (
        (linalg.eigvals(w @ r).abs()).sort(-1).values.sqrt()
        for w, r in ((write.left, read.left), (write.right, read.right))
    )
    return -(own - other).norm(dim=-1)


METRICS: dict[str, Callable[[_Circuit, _Circuit], Tensor]] = {
    "frobenius": _frobenius,
    "cosine": _cosine,
    "spectrum": _spectrum,
}


def _pairs(evidence, groups, heads: Heads, rounds: int) -> tuple[Tensor, Tensor]:
    """For every pair of heads: the best order of its query heads, and what the best elements then gain."""
    first = next(item.cross for items in evidence.values() for item in items)
    count = max(item.cross.shape[2] for items in evidence.values() for item in items)
    order = torch.arange(count, device=first.device).expand(*first.shape[:2], count).clone()
    score = torch.zeros(first.shape[:2], device=first.device, dtype=first.dtype)
    for _ in range(rounds if heads.queries else 1):
        score, options = (
            torch.zeros_like(score),
            torch.zeros(*first.shape[:2], count, count, device=first.device, dtype=first.dtype),
        )
        for base, group in groups.items():
            write, read = _grams(evidence, base, order)
            if (
                isinstance(group, Orthogonal) and not heads.queries
            ):  # the gain of the best rotation, without the rotation itself
                score += 2 * linalg.svdvals(write.cross + read.cross).sum(-1)
                score -= sum(
                    gram.needs_right().diagonal(dim1=-2, dim2=-1).sum(-1) for gram in (write, read)
                )
                continue
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


def _grams(
    evidence, base: str, order: Tensor, pairs: tuple[Tensor, Tensor] | None = None
) -> tuple[Gram, Gram]:
    """The evidence of writers and of readers; zero where there are none."""
    write, read = (
        _gram(evidence[base, role], order, pairs) if evidence[base, role] else None
        for role in (Role.WRITES, Role.READS)
    )
    nothing = torch.zeros_like((write or read).cross)  # type: ignore[union-attr]
    return write or Gram(nothing, nothing), read or Gram(nothing, nothing)


def _gram(items: list[_Crossed], order: Tensor, pairs: tuple[Tensor, Tensor] | None = None) -> Gram:
    """The evidence of a role with B's query heads in order, for all pairs of heads or for some."""
    cross, right = torch.zeros(()), torch.zeros(())
    for item in items:
        met = item.cross
        if met.shape[2] > 1:
            picked = order[:, :, :, None, None, None].expand(*order.shape, 1, *met.shape[-2:])
            met = met.gather(3, picked)
        cross = (
            cross.to(met) + met.sum((2, 3)) if met.shape[2] > 1 else cross.to(met) + met[:, :, 0, 0]
        )
        right = right.to(met) + item.right.sum(1)[None]
    right = right.expand_as(cross)
    if pairs is None:
        return Gram(cross, right)
    return Gram(cross[pairs], right[pairs])
