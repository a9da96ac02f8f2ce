"""Rotary pairs: coordinates that cannot move, in two halves or two by two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from symmerge.derivation.deciding import Choice, Kind
from symmerge.derivation.terms import Axis, Blocks, Factor, Leaf, Met
from symmerge.derivation.walking import Followed
from symmerge.symmetry.groups import RotaryPairs

Layout = Literal["halves", "interleaved"]


@dataclass(frozen=True)
class RotaryPattern:
    """The first coordinates of all pairs are one leaf, and so are the second; the rest follows."""

    leaf: Leaf
    layout: Layout
    rest: Leaf | None = None

    @property
    def size(self) -> int:
        """All coordinates, also those that do not rotate."""
        return 2 * self.leaf.size + (self.rest.size if self.rest else 0)

    @property
    def group(self) -> RotaryPairs:
        """The group that commutes with every rotation of these pairs."""
        return RotaryPairs(self.size, rotary=2 * self.leaf.size, layout=self.layout)


class Reader:
    """Finds pairs in the axes of parameters."""

    def __init__(self, followed: Followed, kinds: Mapping[int, Kind]) -> None:
        self.walk, self.kinds = followed.walk, kinds
        self.parameters = followed.parameters

    def root(self, leaf: Leaf) -> int:
        """The space of a leaf."""
        return self.walk.root(leaf.number)

    def _fixed(self, axis: Axis) -> Leaf | None:
        """The leaf of an axis that is nothing else, if it cannot move."""
        if (
            len(axis) == 1
            and isinstance(axis[0], Met)
            and self.kinds[self.root(axis[0].leaf)].fixed
        ):
            return axis[0].leaf
        return None

    def pairs_in(self, part: Axis) -> RotaryPattern | None:
        """Two factors of a product that are pairs."""
        if len(part) != 2:
            return None
        one, other = (self._fixed((factor,)) for factor in part)
        if one is None or other is None:
            return None
        if other.size == 2 and self.scalable(one):
            return RotaryPattern(one, "interleaved")
        if one.size == 2 and self.scalable(other):
            return RotaryPattern(other, "halves")
        return None

    def scalable(self, leaf: Leaf) -> bool:
        """Whether both coordinates of a pair may scale."""
        return bool(self.kinds[self.root(leaf)].scale)

    def pairs_at(self, parts: tuple[Axis, ...], at: int) -> tuple[RotaryPattern, int] | None:
        """RotaryPattern that begin at a block, and how many blocks they take."""
        pattern, taken = self.pairs_in(parts[at]), 1
        if pattern is None and at + 1 < len(parts):
            one, other = self._fixed(parts[at]), self._fixed(parts[at + 1])
            if one and other and self.root(one) == self.root(other) and self.scalable(one):
                pattern, taken = RotaryPattern(one, "halves"), 2
        if pattern is None:
            return None
        if at + taken < len(parts):
            rest = parts[at + taken]
            if len(rest) == 1 and isinstance(rest[0], Met) and self._free(rest[0].leaf):
                return RotaryPattern(pattern.leaf, pattern.layout, rest[0].leaf), taken + 1
        return pattern, taken

    def _free(self, leaf: Leaf) -> bool:
        kind = self.kinds[self.root(leaf)]
        return bool(kind.choices) and kind.choices[0].group.name == "GeneralLinear"

    def all_pairs(self) -> Iterator[tuple[str, RotaryPattern]]:
        """All pairs of every parameter."""
        for name, state in self.parameters.items():
            for axis in state.axes:
                yield from ((name, pairs) for pairs in self._pairs(axis))

    def _pairs(self, axis: Axis) -> Iterator[RotaryPattern]:
        if pattern := self.pairs_in(axis[-2:]):
            yield pattern
            return
        for factor in axis:
            if isinstance(factor, Blocks):
                at = 0
                while at < len(factor.parts):
                    found_at = self.pairs_at(factor.parts, at)
                    if found_at is None:
                        yield from self._pairs(factor.parts[at])
                    else:
                        yield found_at[0]
                    at += found_at[1] if found_at else 1


def add_rotary(followed: Followed, kinds: Mapping[int, Kind]) -> None:
    """Offer rotary pairs to the spaces that are always met as pairs of one layout."""
    reader = Reader(followed, kinds)
    layouts: dict[int, set[tuple[Layout, int, int]]] = {}
    count: dict[int, int] = {}
    values: dict[int, RotaryPattern] = {}
    for _, pairs in reader.all_pairs():
        root = reader.root(pairs.leaf)
        rest = -1 if pairs.rest is None else reader.root(pairs.rest)
        layouts.setdefault(root, set()).add((pairs.layout, rest, pairs.size))
        count[root] = count.get(root, 0) + (1 if _counts_once(pairs, reader) else 2)
        values[root] = pairs
    for root, in_use in layouts.items():
        kind = kinds[root]
        if len(in_use) == 1 and count[root] >= len(kind.leaves):
            kind.choices.insert(0, Choice(values[root].group, kind.scale))


def _counts_once(pairs: RotaryPattern, reader: Reader) -> bool:
    """Whether the pair is one leaf times two, not two leaves."""
    return any(
        factor is not None
        for name, state in reader.parameters.items()
        if name == pairs.leaf.origin[0]
        for axis in state.axes
        for factor in [_product_of(axis, pairs.leaf)]
    )


def _product_of(axis: Axis, leaf: Leaf) -> Factor | None:
    """The factor of two beside a leaf."""
    for at, factor in enumerate(axis):
        if isinstance(factor, Met) and factor.leaf == leaf:
            beside = [axis[i] for i in (at - 1, at + 1) if 0 <= i < len(axis)]
            return next((one for one in beside if isinstance(one, Met) and one.size == 2), None)
        if isinstance(factor, Blocks):
            for part in factor.parts:
                if factor := _product_of(part, leaf):
                    return factor
    return None
