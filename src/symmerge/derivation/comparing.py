"""Compare two tables of one class: do the same coordinates move, by groups as large?"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from symmerge.symmetry.groups import Group, Signs
from symmerge.symmetry.notation import Atom, Product, Role, Sum
from symmerge.symmetry.spec import Space, Spec

Places = dict[tuple[str, int, int], int]
"""Tensor, axis and coordinate -> the coordinate of the space that it lives at."""


def places_of(spec: Spec, without: Collection[str] = ()) -> dict[str, Places]:
    """Where every hidden space is met, but for some tensors."""
    places_by_space: dict[str, Places] = {name: {} for name in spec.hidden}
    for tensor, axes in spec.tensors.items():
        if tensor in without:
            continue
        for position, axis in enumerate(axes):
            for coordinate, spaces in enumerate(_coordinates(axis, spec.sizes)):
                for atom, index in spaces:
                    if atom.space in places_by_space and not _stays(spec.spaces[atom.space], atom):
                        places_by_space[atom.space][tensor, position, coordinate] = index
    return places_by_space


def _stays(space: Space, atom: Atom) -> bool:
    """Whether nothing happens there: signs do not reach what rides along."""
    return atom.role is Role.RIDES and isinstance(space.group, Signs)


def _coordinates(
    axis: Product | Sum | Atom, sizes: Mapping[str, int]
) -> list[tuple[tuple[Atom, int], ...]]:
    """For each coordinate of an axis, its spaces and its place in each."""
    if isinstance(axis, Atom):
        return [((axis, index),) for index in range(sizes[axis.space])]
    if isinstance(axis, Sum):
        return [one for term in axis.terms for one in _coordinates(term, sizes)]
    rows: list[tuple[tuple[Atom, int], ...]] = [()]
    for factor in axis.factors:
        inner = _coordinates(factor, sizes)
        rows = [(*outer, *one) for outer in rows for one in inner]
    return rows


def shortfalls(derived: Spec, known: Spec, unused: Collection[str] = ()) -> list[str]:
    """What a known table has that a derived one lacks: empty if it is as large or larger.

    `unused` tensors compute nothing, so that it does not matter whether they move along.
    """
    mine, problems = places_of(derived), []
    for name, places in places_of(known, unused).items():
        space = known.spaces[name]
        if space.group.size == 1 or not places:  # it only meets what computes nothing
            continue
        matching = [one for one, own in mine.items() if _same_places(own, places)]
        if not matching:
            problems.append(f"{name}: no space with these coordinates")
        elif not any(_at_least(derived, one, known, space) for one in matching):
            groups = ", ".join(str(derived.spaces[one].group) for one in matching)
            problems.append(f"{name}: {groups}, known is {space.group}")
    return problems


def surplus(derived: Spec, known: Spec, unused: Collection[str] = ()) -> list[str]:
    """Spaces that a derived table has beyond a known one, or with larger groups."""
    theirs, more = places_of(known, unused), []
    for name, places in places_of(derived).items():
        matching = [one for one, own in theirs.items() if _same_places(own, places)]
        if not any(_at_least(known, one, derived, derived.spaces[name]) for one in matching):
            more.append(f"{name}: {derived.spaces[name].group}")
    return more


def _same_places(one: Places, other: Places) -> bool:
    """Whether the same coordinates are one coordinate of a space."""
    if one.keys() != other.keys():
        return False
    pairs = {(one[place], other[place]) for place in one}
    return len(pairs) == len(set(one.values())) == len(set(other.values()))


def _at_least(mine: Spec, name: str, known: Spec, space: Space) -> bool:
    own = mine.spaces[name]
    copies = (mine.batch(name) or (1,))[0], (known.batch(space.name) or (1,))[0]
    return _freedom(own.group, copies[0]) >= _freedom(space.group, copies[1])


def _freedom(group: Group, copies: int) -> tuple[int, float]:
    return copies * group.dimension, round(copies * group.log10_order, 6)
