"""Write what was followed as a table in the notation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from symmerge.derivation.deciding import Choice, Kind, absorbable, foldable
from symmerge.derivation.following import INNER
from symmerge.derivation.patterns import Reader, RotaryPattern
from symmerge.derivation.terms import Axis, Blocks, Leaf, Met, length, mets
from symmerge.derivation.walking import Followed
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    Permutation,
    RotaryPairs,
    Signs,
    Trivial,
)
from symmerge.symmetry.notation import Atom, Product, Role, Sum, atoms
from symmerge.symmetry.spec import Norm, Scale, Space, Spec, layer_of

ROLES = {1: Role.WRITES, -1: Role.READS, 0: Role.RIDES}
UNITS, STREAM = "ff", "residual"


@dataclass(frozen=True)
class Heads:
    """Which spaces hold others inside: heads, and queries of a head."""

    parents: Mapping[int, int]

    def holds(self, root: int) -> bool:
        """Whether elements of another space are one per index of this."""
        return root in self.parents.values()


class Table:
    """The table for one choice of a group per space."""

    def __init__(
        self, followed: Followed, kinds: Mapping[int, Kind], picked: Mapping[int, int]
    ) -> None:
        self.followed, self.kinds, self.picked = followed, kinds, picked
        self.walk, self.reader = followed.walk, Reader(followed, kinds)
        self.holders: frozenset[int] = frozenset()
        self.heads = Heads(self._parents())
        self.holders = frozenset(self.heads.parents.values())
        self.names = self._names()

    def choice(self, root: int) -> Choice:
        """The group that was picked for a space."""
        kind = self.kinds[root]
        return kind.choices[min(self.picked.get(root, 0), len(kind.choices) - 1)]

    def group(self, root: int) -> Group:
        """The group of a space; heads permute, since bases inside them do all else."""
        group = self.choice(root).group
        if self.heads.holds(root) and not isinstance(group, Trivial):
            return Permutation(group.size)
        return group

    def still(self, root: int) -> bool:
        """Whether nothing moves in a space."""
        return isinstance(self.choice(root).group, Trivial)

    def power(self, leaf: Leaf) -> int:
        """How a leaf transforms: by the element, its inverse, or neither."""
        root = self.root(leaf)
        return 1 if root in self.holders else self.choice(root).powers.get(leaf.number, 0)

    def root(self, leaf: Leaf) -> int:
        """The space of a leaf."""
        return self.walk.root(leaf.number)

    # heads

    def _parents(self) -> dict[int, int]:
        outside: dict[int, list[list[int]]] = {}
        for state in self.followed.parameters.values():
            for axis in state.axes:
                for leaf, outer in _outer(axis, ()):
                    if self.power(leaf) and not self.still(self.root(leaf)):
                        roots = [self.root(one) for one in outer]
                        outside.setdefault(self.root(leaf), []).append(roots)
        apart = {(self.walk.root(one), self.walk.root(other)) for one, other in self.walk.apart}
        parents = {}
        for root, lists in outside.items():
            common = set.intersection(*map(set, lists))
            possible = [one for one in lists[0] if one in common and self._can_hold(root, one)]
            if possible := [one for one in possible if (root, one) not in apart]:
                parents[root] = possible[-1]
        # a parent has no parent of its own but for queries, which hold nothing
        return {root: parent for root, parent in parents.items() if parent not in parents}

    def _can_hold(self, root: int, parent: int) -> bool:
        return parent != root and not self.kinds[parent].fixed

    # names

    def _names(self) -> dict[int, str]:
        moving = [root for root in self.kinds if not self.still(root)]
        plain = [root for root in moving if root not in self.heads.parents]
        streams = [root for root in plain if not self.heads.holds(root)]
        across = [root for root in streams if self._layer(root) is None]
        stream = max(across, key=self._tensors, default=None)
        crowd = Counter(self._layer(root) for root in streams if root != stream)
        names: dict[int, str] = {}
        for root in moving:
            name = self._name(root, stream, crowd[self._layer(root)] == 1)
            layer = self._layer(root)
            names[root] = _unused(name, "" if layer is None else f".{layer}", names.values())
        return names

    def _name(self, root: int, stream: int | None, alone: bool) -> str:
        if root == stream:
            return STREAM
        if self.heads.holds(root):
            return "head"
        if root in self.heads.parents:
            group = self.choice(root).group
            if isinstance(group, Permutation):
                return "query"
            return "qk" if INNER in self.kinds[root].marks else "vo"
        basis = isinstance(self.choice(root).group, GeneralLinear | RotaryPairs | Signs)
        if basis and INNER in self.kinds[root].marks:  # of the only key-value head
            return "qk"
        if self._layer(root) is not None and alone:
            return UNITS
        return self._module(root)

    def _module(self, root: int) -> str:
        """The module that writes to a space."""
        name = self.kinds[root].leaves[0].origin[0]
        pieces = [piece for piece in name.split(".") if not piece.isdigit()]
        return re.sub(r"\W", "_", "_".join(pieces[:-1][-2:] or pieces))

    def _layer(self, root: int) -> int | None:
        layers = {layer_of(f".{leaf.origin[0]}") for leaf in self.kinds[root].leaves}
        return layers.pop() if len(layers) == 1 else None

    def _tensors(self, root: int) -> int:
        return len({leaf.origin[0] for leaf in self.kinds[root].leaves})

    # axes

    def axis(self, axis: Axis) -> Product:
        """One axis of a parameter in the notation."""
        return self._whole(axis) or Product(tuple(self._factors(axis)))

    def _whole(self, axis: Axis) -> Product | None:
        """An axis on which nothing moves is one visible space."""
        if all(self.still(self.root(met.leaf)) for met in mets(axis)):
            return Product((_visible(length(axis)),))
        return None

    def _factors(self, axis: Axis) -> Iterator[Atom | Sum]:
        factors = list(axis)
        while factors:
            pairs = self.reader.pairs_in(tuple(factors[:2])) if len(factors) == 2 else None
            if pairs and self._rotates(pairs):
                yield self._atom(pairs.leaf)
                return
            factor = factors.pop(0)
            if isinstance(factor, Blocks):
                terms = tuple(self._terms(factor.parts))
                yield from terms[0].factors if len(terms) == 1 else [Sum(terms)]
            else:
                assert isinstance(factor, Met)
                yield self._atom(factor.leaf)

    def _terms(self, parts: tuple[Axis, ...]) -> Iterator[Product]:
        at = 0
        while at < len(parts):
            pattern = self.reader.pairs_at(parts, at)
            if pattern and self._rotates(pattern[0]):
                yield Product((self._atom(pattern[0].leaf),))
                at += pattern[1]
                continue
            yield from _flat(self.axis(parts[at]))
            at += 1

    def _rotates(self, pairs: RotaryPattern) -> bool:
        return isinstance(self.choice(self.root(pairs.leaf)).group, RotaryPairs)

    def _atom(self, leaf: Leaf) -> Atom:
        root = self.root(leaf)
        power = self.power(leaf)
        if self.still(root) or (power == 0 and isinstance(self.choice(root).group, Signs)):
            return _visible(leaf.size)
        return Atom(self.names[root], ROLES[power])

    # the table

    def spec(self, kind: str, ties: Mapping[str, str]) -> Spec:
        """The whole table."""
        tensors = {
            name: tuple(map(self.axis, state.axes))
            for name, state in self.followed.parameters.items()
            if name not in ties
        }
        used = [atom.space for axes in tensors.values() for atom in atoms(axes)]
        spaces = {name: Space(name, Trivial(int(name[5:]))) for name in used if _is_visible(name)}
        spaces |= {self.names[root]: self._space(root) for root in self._order(used)}
        return Spec(
            family=kind,
            architecture=kind,
            task="custom",
            spaces=spaces,
            tensors=tensors,
            norms=tuple(self._norms()),
            scales=tuple(self._scales()),
            ties=dict(ties),
        )

    def _order(self, used: list[str]) -> list[int]:
        by_name = {name: root for root, name in self.names.items()}
        return [by_name[name] for name in dict.fromkeys(used) if name in by_name]

    def _space(self, root: int) -> Space:
        parent = self.heads.parents.get(root)
        per = None if parent is None else self.names.get(parent)
        return Space(self.names[root], self.group(root), per)

    def _norms(self) -> Iterator[Norm]:
        for site in self.walk.sites:
            root = self.root(site.leaf)
            if foldable(site) and not site.writer and not self.still(root):
                readers = tuple(dict.fromkeys(one.removesuffix(".weight") for one in site.readers))
                norm = Norm(site.gain, site.shift, self.names[root], readers)
                if absorbable(site) and site.embedding:
                    writer = site.embedding.removesuffix(".weight")
                    norm = replace(norm, writer=writer, epsilon=site.epsilon)
                yield norm

    def _scales(self) -> Iterator[Scale]:
        for site in self.walk.sites:
            root = self.root(site.leaf)
            if foldable(site) and site.writer and not self.still(root):
                yield Scale(site.gain, self.names[root], site.writer.removesuffix(".weight"))


def _outer(axis: Axis, outside: tuple[Leaf, ...]) -> Iterator[tuple[Leaf, tuple[Leaf, ...]]]:
    """Every leaf of an axis, and the leaves outside of it."""
    for factor in axis:
        if isinstance(factor, Met):
            yield factor.leaf, outside
            outside = (*outside, factor.leaf)
        elif isinstance(factor, Blocks):
            for part in factor.parts:
                yield from _outer(part, outside)


def _flat(term: Product) -> tuple[Product, ...]:
    """The terms of a sum inside a sum: blocks that were cut in two steps are one row of blocks."""
    first = term.factors[0]
    return first.terms if isinstance(first, Sum) and len(term.factors) == 1 else (term,)


def _visible(size: int) -> Atom:
    return Atom(f"shown{size}", Role.WRITES)


def _is_visible(name: str) -> bool:
    return re.fullmatch(r"shown\d+", name) is not None


def _unused(name: str, layer: str, taken: object) -> str:
    names = set(taken)  # type: ignore[call-overload]
    number, candidate = 1, f"{name}{layer}"
    while candidate in names:
        number += 1
        candidate = f"{name}_{number}{layer}"
    return candidate


__all__ = ["GeneralLinear", "Table", "replace"]
