"""What an axis is made of while it is followed: leaves, products, sums, and places that are fixed.

An axis is a tuple of factors, outer first, as in the notation. Every leaf comes from an axis of a
parameter. Where an operation needs it finer, the axis is cut and everything is followed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

Origin = tuple[str, int]
"""A parameter and one of its axes."""
Path = tuple[int, ...]
Exponents = Mapping[int, Fraction]
"""A sum of unknowns, by leaf: the power of a leaf's scale with which a tensor scales."""
SYSTEMS = ("scale", "sign", "role")
Cut = int | tuple[str, tuple[Any, ...]]
"""How an axis is cut: its size, ``("product", parts)`` or ``("sum", parts)``."""


class Unfollowed(Exception):
    """An operation that cuts axes in a way that the notation cannot express."""


class Refine(Exception):
    """An axis of a parameter must be cut finer before it can be followed."""

    def __init__(self, leaf: Leaf, cut: Cut, *, outer: bool = False) -> None:
        super().__init__(f"{leaf.origin}{list(leaf.path)} -> {cut}")
        self.leaf, self.cut, self.outer = leaf, cut, outer


@dataclass(frozen=True)
class Leaf:
    """The smallest part of a parameter's axis."""

    number: int
    size: int
    origin: Origin
    path: Path


@dataclass(frozen=True)
class Met:
    """A leaf on an axis of a tensor, and how that tensor scales, changes sign, and transforms."""

    leaf: Leaf
    scale: Exponents
    sign: Exponents
    role: Exponents

    @property
    def size(self) -> int:
        return self.leaf.size

    def with_exponents(self, **changed: Exponents) -> Met:
        """The same leaf with other exponents."""
        own = {name: getattr(self, name) for name in SYSTEMS}
        return Met(self.leaf, **{**own, **changed})


@dataclass(frozen=True)
class Plain:
    """An axis that does not transform: data, constants; `free` if the tensor is the same along."""

    size: int
    free: bool = False


@dataclass(frozen=True)
class Blocks:
    """Axes one after the other."""

    parts: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return sum(map(length, self.parts))


@dataclass(frozen=True)
class Which:
    """The place of a block, where a sum of equal blocks was split off its blocks."""

    group: int
    size: int


@dataclass(frozen=True)
class Versions:
    """The part of an axis inside such blocks: one axis for each."""

    group: int
    options: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return length(self.options[0])


Factor = Met | Plain | Blocks | Which | Versions
Axis = tuple[Factor, ...]


def length(axis: Iterable[Factor]) -> int:
    """The number of coordinates."""
    return prod(factor.size for factor in axis)


def mets(axis: Iterable[Factor]) -> Iterator[Met]:
    """Every leaf on an axis."""
    for factor in axis:
        if isinstance(factor, Met):
            yield factor
        for part in getattr(factor, "parts", ()) or getattr(factor, "options", ()):
            yield from mets(part)


def tidy(axis: Iterable[Factor]) -> Axis:
    """Without factors of one coordinate, with plain neighbours as one."""
    result: list[Factor] = []
    for factor in axis:
        last = result[-1] if result else None
        if isinstance(factor, Plain) and isinstance(last, Plain) and last.free == factor.free:
            result[-1] = Plain(last.size * factor.size, factor.free)
        elif factor.size != 1 or isinstance(factor, Which):
            result.append(factor)
    return tuple(result)


def blocks(parts: Iterable[Axis]) -> Axis:
    """Axes one after the other: flat, with plain neighbours as one."""
    flat: list[Axis] = []
    for part in parts:
        inner = part[0].parts if len(part) == 1 and isinstance(part[0], Blocks) else (part,)
        for one in inner:
            if flat and _plain(flat[-1]) and _plain(one):
                flat[-1] = (Plain(length(flat[-1]) + length(one)),)
            else:
                flat.append(one)
    return flat[0] if len(flat) == 1 else (Blocks(tuple(flat)),)


def _plain(axis: Axis) -> bool:
    return all(isinstance(factor, Plain) for factor in axis)


def instantiate(cut: Cut, origin: Origin, numbers: Iterator[int], path: Path = ()) -> Axis:
    """The axis of a parameter, cut so."""
    if isinstance(cut, int):
        if cut == 1:
            return ()
        number = next(numbers)
        own = {number: Fraction(1)}
        return (Met(Leaf(number, cut, origin, path), own, own, own),)
    kind, parts = cut
    made = [
        instantiate(part, origin, numbers, (*path, number)) for number, part in enumerate(parts)
    ]
    if kind == "product":
        return tuple(factor for axis in made for factor in axis)
    return (Blocks(tuple(made)),)


def refined(cut: Cut, path: Path, new: Cut, *, outer: bool = False) -> Cut:
    """The axis with one leaf cut; `outer`: what its product has inside is repeated in each part."""
    if not path:
        return new
    assert not isinstance(cut, int)
    kind, parts = cut
    first, *rest = path
    if outer and not rest and kind == "product":
        inside = parts[first + 1 :]
        assert not isinstance(new, int)
        repeated = tuple(("product", (part, *inside)) for part in new[1])
        return "product", (*parts[:first], ("sum", repeated))
    changed = refined(parts[first], tuple(rest), new, outer=outer)
    if not isinstance(changed, int) and changed[0] == kind:  # a product of products is one
        return kind, (*parts[:first], *changed[1], *parts[first + 1 :])
    return kind, (*parts[:first], changed, *parts[first + 1 :])


def take(axis: list[Factor], size: int, groups: Iterator[int]) -> tuple[Axis, list[Factor]]:
    """Split the outermost `size` coordinates' worth of factors off an axis."""
    taken: list[Factor] = []
    while size > 1:
        if not axis:
            raise Unfollowed("an axis is split across its factors")
        first, rest = axis[0], axis[1:]
        if size % first.size == 0:
            taken.append(first)
            size, axis = size // first.size, rest
            continue
        if first.size % size:
            raise Unfollowed("an axis is split across its factors")
        outer, inner = _split(first, size, groups)
        taken += outer
        return tuple(taken), [*inner, *rest]
    return tuple(taken), axis


def _split(factor: Factor, size: int, groups: Iterator[int]) -> tuple[Axis, Axis]:
    """One factor as an outer and an inner one."""
    inner = factor.size // size
    if isinstance(factor, Plain):
        return (Plain(size, factor.free),), (Plain(inner, factor.free),)
    if isinstance(factor, Met):
        raise Refine(factor.leaf, ("product", (size, inner)))
    if isinstance(factor, Blocks) and {length(part) for part in factor.parts} == {inner}:
        group = next(groups)
        return (Which(group, size),), (Versions(group, factor.parts),)
    if isinstance(factor, Versions):
        pairs = [take(list(option), size, groups) for option in factor.options]
        outer, rest = zip(*((one, tuple(other)) for one, other in pairs), strict=True)
        return (Versions(factor.group, outer),), (Versions(factor.group, rest),)
    raise Unfollowed("the blocks of an axis are split unevenly")


def regroup(
    axes: Iterable[Axis], shape: tuple[int, ...], groups: Iterator[int]
) -> tuple[Axis, ...]:
    """The same coordinates in another shape."""
    factors = list(tidy(factor for axis in axes for factor in axis))
    result = []
    for size in shape:
        # what is left over inside a split Which/Versions pair stays in order
        taken, factors = take(factors, size, groups)
        result.append(joined(taken))
    return tuple(result)


def joined(axis: Axis) -> Axis:
    """An axis in which the place of a block and its inside meet again is a sum of blocks."""
    for at, factor in enumerate(axis):
        if isinstance(factor, Which):
            inside = axis[at + 1 :]
            if not inside:
                return tidy(axis)
            options = [tidy(chosen(inside, factor.group, i)) for i in range(factor.size)]
            return tidy((*axis[:at], *blocks(options)))
    return tidy(axis)


def chosen(axis: Iterable[Factor], group: int, at: int) -> Axis:
    """An axis inside one block."""
    result: list[Factor] = []
    for factor in axis:
        if isinstance(factor, Versions) and factor.group == group:
            result += factor.options[at]
        else:
            result.append(factor)
    return tuple(result)


def chosen_groups(axes: Iterable[Axis]) -> set[int]:
    """The groups of blocks that axes are inside of."""
    return {factor.group for axis in axes for factor in axis if isinstance(factor, Versions)}
