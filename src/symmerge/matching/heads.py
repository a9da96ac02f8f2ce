"""Match attention heads: pair them, and find the best bases inside each pair.

Every pair of heads is matched inside first: a basis for queries and keys, a basis for values, and
(grouped heads) an order of the query heads. Then heads are assigned by the resulting gains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
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
from symmerge.symmetry.groups.polar_factor import nuclear_norm
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Occurrence, Spec

ROUNDS = 4  # alternating between bases and query heads
ROLES = Role.WRITES, Role.READS


class Views(NamedTuple):
    """Both models' views of a piece, and how much its squared error counts."""

    a: Tensor
    b: Tensor
    scale: float


ViewsOf = Callable[[Occurrence], Views]
"""The views of an occurrence, with B moved in every space but those being matched."""


@dataclass(frozen=True)
class AttentionSpaces:
    """The spaces of one attention layer: its heads, the query heads inside each, and the bases."""

    heads: str
    queries: str | None
    bases: tuple[str, ...]

    @property
    def spaces(self) -> tuple[str, ...]:
        return (self.heads, *((self.queries,) if self.queries else ()), *self.bases)


def attention_layers(spec: Spec) -> list[AttentionSpaces]:
    """Every attention layer of a table: a space that others are `per`."""
    layers = []
    for heads in dict.fromkeys(space.per for space in spec.hidden.values() if space.per):
        inner = [space.name for space in spec.hidden.values() if space.per == heads]
        queries = next((name for name in inner if _holds_bases(spec, name, inner)), None)
        bases = tuple(name for name in inner if name != queries)
        layers.append(AttentionSpaces(heads, queries, bases))
    return layers


def _holds_bases(spec: Spec, name: str, inner: list[str]) -> bool:
    """Whether a space contains another one of its layer: query heads do, bases do not."""
    return isinstance(spec.spaces[name].group, Permutation) and any(
        atom.space in inner and atom.space != name
        for occurrence in spec.occurrences(name)
        for atom in occurrence.piece.atoms
    )


@dataclass(frozen=True)
class HeadOptions:
    """How heads are matched.

    | option | value | meaning |
    |---|---|---|
    | `metric` | best | pair heads by how close the best bases bring them |
    | | frobenius, cosine | by their circuits as they are, which no basis changes |
    | | spectrum | by the singular values of their circuits |
    | `inside` | rotation | the bases of a pair: rotations, in the balanced gauge |
    | | general | any invertible matrix, by Gauss-Newton |
    | | gradient | any invertible matrix, by gradient descent |
    | `follow` | | queries and keys take the order of the values, if both are permutations |
    """

    metric: Literal["best", "frobenius", "cosine", "spectrum"] = "best"
    inside: Literal["rotation", "general", "gradient"] = "rotation"
    follow: bool = False


def match_heads(
    spec: Spec, layer: AttentionSpaces, views: ViewsOf, options: HeadOptions
) -> dict[str, Element]:
    """The elements of one attention layer that bring B's heads closest to A's."""
    followers = [
        base for base in layer.bases if options.follow and spec.spaces[base].translation == "drops"
    ]
    pairs = _HeadPairs(spec, layer, views, [base for base in layer.bases if base not in followers])
    order, score = pairs.match_inside()
    if options.metric != "best":
        score = pairs.circuit_score(METRICS[options.metric], order)
    moves = layer.heads in spec.hidden
    partner = assign(score) if moves else torch.arange(spec.sizes[layer.heads])
    chosen = torch.arange(len(partner)), partner
    elements: dict[str, Element] = {layer.heads: {"index": partner}} if moves else {}
    if layer.queries:
        elements[layer.queries] = {"index": order[chosen].cpu()}
    for base in pairs.groups:
        write, read = pairs.grams(base, order, chosen)
        elements[base] = _basis(spec.spaces[base].group, write, read, options)
    leader = next(iter(pairs.groups))
    return elements | {base: _follow(spec, base, leader, elements[leader]) for base in followers}


def _follow(spec: Spec, base: str, leader: str, element: Element) -> Element:
    """A copy of the leader's element if the groups agree, else the identity."""
    if spec.spaces[leader].group != spec.spaces[base].group:
        element = spec.spaces[base].group.identity(spec.batch(base))
    return {part: value.clone() for part, value in element.items()}  # files store no tensor twice


def _basis(group: Group, write: Gram, read: Gram, options: HeadOptions) -> Element:
    if isinstance(group, GeneralLinear) and options.inside == "general":
        return group.nearest(write, read)
    element = _scoring_group(group).nearest(write, read)
    if isinstance(group, GeneralLinear) and options.inside == "gradient":
        return {"matrix": descend_invertible(element["matrix"], write, read)}
    return element


def _scoring_group(group: Group) -> Group:
    """Rotations stand in for all bases: in the balanced gauge they lose little and cost one SVD."""
    return Orthogonal(group.size) if isinstance(group, GeneralLinear) else group


@dataclass(frozen=True)
class _Crossed:
    """Gram matrices between the heads of A (a) and B (b) and their query heads (p, q).

    Tensors without query heads have p = q = 1.
    """

    cross: Float[Tensor, "a b p q n n"]
    left: Float[Tensor, "a p n n"]
    right: Float[Tensor, "b q n n"]


def _cross(views: Views, occurrence: Occurrence, layer: AttentionSpaces) -> _Crossed:
    spaces = [atom.space for atom in occurrence.piece.atoms]
    queries = [spaces.index(layer.queries)] if layer.queries in spaces else []
    front = [spaces.index(layer.heads), *queries, occurrence.position]
    a, b = (_to_front(view, front, bool(queries)) for view in (views.a, views.b))
    left, right = (
        torch.einsum("bqnm,bqkm->bqnk", side, side).double().mul_(views.scale) for side in (a, b)
    )
    cross = torch.einsum("apnm,bqkm->abpqnk", a, b).double().mul_(views.scale)
    return _Crossed(cross, left, right)


def _to_front(view: Tensor, front: list[int], has_queries: bool) -> Float[Tensor, "head query n m"]:
    view = view.permute(*front, *(dim for dim in range(view.ndim) if dim not in front))
    view = view if has_queries else view.unsqueeze(1)
    return view.flatten(3) if view.ndim > 3 else view.unsqueeze(-1)


class _HeadPairs:
    """The evidence about all pairs of heads of one layer."""

    def __init__(
        self, spec: Spec, layer: AttentionSpaces, views: ViewsOf, bases: list[str]
    ) -> None:
        self.layer = layer
        self.groups = {base: _scoring_group(spec.spaces[base].group) for base in bases}
        self.evidence: Mapping[tuple[str, Role], list[_Crossed]] = {
            (base, role): [
                _cross(views(occurrence), occurrence, layer)
                for occurrence in spec.occurrences(base)
                if occurrence.role is role
            ]
            for base in bases
            for role in ROLES
        }

    def match_inside(self) -> tuple[Int[Tensor, "a b q"], Float[Tensor, "a b"]]:
        """For every pair of heads: the best order of its query heads, and the gain."""
        crosses = [item.cross for items in self.evidence.values() for item in items]
        count = max(cross.shape[2] for cross in crosses)
        order = torch.arange(count, device=crosses[0].device)
        order = order.expand(*crosses[0].shape[:2], count).clone()
        score, query_scores = self._score(order)
        for _ in range(ROUNDS - 1 if self.layer.queries else 0):
            order = assign(query_scores).to(order.device)
            score, query_scores = self._score(order)
        return (assign(query_scores).to(order.device) if self.layer.queries else order), score

    def _score(self, order: Tensor) -> tuple[Float[Tensor, "a b"], Float[Tensor, "a b q q"]]:
        """The gain of the best bases with query heads in `order`; that of each query-head pair."""
        first = next(item.cross for items in self.evidence.values() for item in items)
        score = first.new_zeros(first.shape[:2])
        query_scores = first.new_zeros(*order.shape, order.shape[-1])
        for base, group in self.groups.items():
            write, read = self.grams(base, order)
            if isinstance(group, Orthogonal) and not self.layer.queries:
                # the gain of the best rotation, without the rotation itself
                score += 2 * nuclear_norm(write.cross + read.cross)
                score -= _trace(write) + _trace(read)
                continue
            element = group.nearest(write, read)
            for role, gram in zip(ROLES, (write, read), strict=True):
                score += _gain(group, element, role, gram)
                for item in self.evidence[base, role]:
                    if item.cross.shape[2] > 1:
                        query_scores += _query_gain(group, element, role, item.cross)
        return score, query_scores

    def circuit_score(self, metric: Metric, order: Tensor) -> Float[Tensor, "a b"]:
        """Every pair of heads by the metric of its circuits."""
        scores = [
            metric(*(_circuit(self.evidence[base, role], order) for role in ROLES))
            for base in self.groups
        ]
        return torch.stack(scores).sum(0)

    def grams(
        self, base: str, order: Tensor, chosen: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Gram, Gram]:
        """Gram matrices of writers and of readers, for all or chosen pairs; zero if none."""
        write, read = (
            _gram(self.evidence[base, role], order, chosen) if self.evidence[base, role] else None
            for role in ROLES
        )
        nothing = torch.zeros_like((write or read).cross)  # type: ignore[union-attr]
        return write or Gram(nothing, nothing), read or Gram(nothing, nothing)


def _gram(
    items: list[_Crossed], order: Tensor, chosen: tuple[Tensor, Tensor] | None = None
) -> Gram:
    """The evidence of one role with B's query heads in order, for all pairs or chosen ones."""
    cross, right = torch.zeros(()), torch.zeros(())
    for item in items:
        met = item.cross
        if met.shape[2] > 1:
            index = order[:, :, :, None, None, None].expand(*order.shape, 1, *met.shape[-2:])
            met = met.gather(3, index).sum((2, 3))
        else:
            met = met[:, :, 0, 0]
        cross = cross.to(met) + met
        right = right.to(met) + item.right.sum(1)[None]
    right = right.expand_as(cross)
    return Gram(cross, right) if chosen is None else Gram(cross[chosen], right[chosen])


def _trace(gram: Gram) -> Tensor:
    return gram.needs_right().diagonal(dim1=-2, dim2=-1).sum(-1)


def _gain(group: Group, element: Element, role: Role, gram: Gram) -> Tensor:
    """How much gB reduces the squared error |A|^2: 2 <A, gB> - |gB|^2."""
    matrix = _matrix(group, element, role, gram.cross)
    return ((2 * gram.cross - matrix @ gram.needs_right()) * matrix).sum((-2, -1))


def _query_gain(group: Group, element: Element, role: Role, cross: Tensor) -> Tensor:
    matrix = _matrix(group, element, role, cross[:, :, 0, 0])
    return (cross * matrix[:, :, None, None]).sum((-2, -1))


def _matrix(group: Group, element: Element, role: Role, like: Tensor) -> Tensor:
    batch = next(iter(element.values())).shape[: like.ndim - 2]
    return group.act(element, torch.eye(group.size).to(like).expand(*batch, -1, -1), role)


# metrics of circuits


class _Circuit(NamedTuple):
    """Gram matrices of one role for all pairs of heads: A with A, A with B, B with B."""

    left: Tensor
    cross: Tensor
    right: Tensor


Metric = Callable[[_Circuit, _Circuit], Tensor]


def _circuit(items: list[_Crossed], order: Tensor) -> _Circuit:
    gram = _gram(items, order)
    left = sum((item.left.sum(1) for item in items), torch.zeros(()).to(gram.cross))[:, None]
    return _Circuit(left.expand_as(gram.cross), gram.cross, gram.needs_right())


def _inner_products(write: _Circuit, read: _Circuit) -> _Circuit:
    """<A, A>, <A, B> and <B, B> of the circuits y'x, from thin factors.

    <y'x, v'u> = sum((y v') * (x u')).
    """
    return _Circuit(*((w * r).sum((-2, -1)) for w, r in zip(write, read, strict=True)))


def _frobenius(write: _Circuit, read: _Circuit) -> Tensor:
    inner = _inner_products(write, read)
    return -(inner.left + inner.right - 2 * inner.cross).clamp_min(0).sqrt()


def _cosine(write: _Circuit, read: _Circuit) -> Tensor:
    inner = _inner_products(write, read)
    return inner.cross / (inner.left * inner.right).sqrt().clamp_min(1e-30)


def _spectrum(write: _Circuit, read: _Circuit) -> Tensor:
    """Singular values of the circuits: the roots of the eigenvalues of (x x')(y y')."""
    a, b = (
        linalg.eigvals(w @ r).abs().sort(-1).values.sqrt()
        for w, r in ((write.left, read.left), (write.right, read.right))
    )
    return -(a - b).norm(dim=-1)


METRICS: Mapping[str, Metric] = {"frobenius": _frobenius, "cosine": _cosine, "spectrum": _spectrum}
