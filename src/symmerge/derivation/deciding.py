"""The largest group of our list that every operation on a space allows, and smaller ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from symmerge.derivation.following import (
    FIXED,
    INNER,
    LENGTH,
    MEAN,
    POINTWISE,
    Following,
    Site,
)
from symmerge.derivation.terms import Exponents, Leaf
from symmerge.derivation.walking import Followed
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    ScaledPermutation,
    SignedPermutation,
    Signs,
    Trivial,
)

Powers = Mapping[int, int]


@dataclass(frozen=True)
class Choice:
    """A group, and the power of its elements by which each leaf transforms (0: rides along)."""

    group: Group
    powers: Powers


@dataclass
class Kind:
    """All leaves that are one space, and the groups it may have, the largest first."""

    root: int
    size: int
    leaves: list[Leaf]
    marks: frozenset[str]
    choices: list[Choice] = field(default_factory=list)
    scale: Powers = field(default_factory=dict)

    @property
    def fixed(self) -> bool:
        """Whether no coordinate can move."""
        return FIXED in self.marks


def kinds_of(followed: Followed) -> dict[int, Kind]:
    """Every space, with the groups that its operations allow."""
    walk = followed.walk
    _mark_sites(walk)
    by_root: dict[int, list[Leaf]] = {}
    for leaf in walk.leaves:
        by_root.setdefault(walk.root(leaf.number), []).append(leaf)
    equations = {system: _by_root(walk, system) for system in walk.equations}
    kinds = {}
    for root, leaves in by_root.items():
        used = any(
            leaf.origin[0] in followed.used and leaf.number not in followed.unreached
            for leaf in leaves
        )
        marks = frozenset(walk.marks[root] | (set() if used else {FIXED, "unused"}))
        kind = Kind(root, leaves[0].size, leaves, marks)
        numbers = [leaf.number for leaf in leaves]
        own = {system: equations[system].get(root, []) for system in equations}
        _decide(kind, numbers, own, walk.readers, rigid=not used)
        kinds[root] = kind
    return kinds


def foldable(site: Site) -> bool:
    """Whether only linear maps read what a gain multiplies, or it follows one."""
    if site.writer:
        return site.writer.endswith(".weight")
    # the bias of a map is found by the name of its weight; without a shift none is needed
    named = all(reader.endswith(".weight") or not site.shift for reader in site.readers)
    return named and (site.foldable or (absorbable(site) and bool(site.readers)))


def absorbable(site: Site) -> bool:
    """Whether a gain right after an embedding goes into it."""
    written = site.embedding is not None and site.embedding.endswith(".weight")
    return written and site.absorbable and not site.foldable and site.epsilon > 0


def _mark_sites(walk: Following) -> None:
    gains = [site.gain for site in walk.sites]
    for site in walk.sites:
        if not foldable(site) or gains.count(site.gain) > 1:
            site.foldable, site.absorbable, site.writer = False, False, None
            walk.marks[walk.root(site.leaf.number)].add(POINTWISE)


def _by_root(walk: Following, system: str) -> dict[int, list[Exponents]]:
    by_root: dict[int, list[Exponents]] = {}
    for equation in walk.equations[system]:
        by_root.setdefault(walk.root(next(iter(equation))), []).append(equation)
    return by_root


def _decide(
    kind: Kind,
    numbers: list[int],
    own: Mapping[str, list[Exponents]],
    readers: Collection[int],
    *,
    rigid: bool,
) -> None:
    n = kind.size
    roles = _roles(solutions(numbers, own["role"]), readers) or dict.fromkeys(numbers, 1)
    parities = [*parity_solutions(numbers, own["sign"])]
    scales = _unit(solutions(numbers, own["scale"]))
    signed = [one for one in scales if _even(one, own["sign"])]
    # a scale of both signs is the larger group
    kind.scale = max(signed or scales, key=_support, default={})
    sign = _with_roles(max(parities, key=len, default=set()), roles)
    choices: list[Choice] = []
    if rigid:
        choices = []
    elif kind.fixed:
        choices += [Choice(Signs(n), sign)] if sign else []
    else:
        choices += _rotations(kind, roles, numbers)
        if kind.scale:
            choices.append(Choice(ScaledPermutation(n, positive=not signed), kind.scale))
        if sign:
            choices.append(Choice(SignedPermutation(n), sign))
        choices.append(Choice(Permutation(n), roles))
    kind.choices = [*choices, Choice(Trivial(n), dict.fromkeys(numbers, 1))]


def _rotations(kind: Kind, roles: Powers, numbers: list[int]) -> list[Choice]:
    n, full = kind.size, len(kind.scale) == len(numbers)
    if not kind.marks <= {INNER, LENGTH, MEAN}:
        return []
    if kind.marks <= {INNER} and full:
        return [Choice(GeneralLinear(n), kind.scale)]
    if MEAN in kind.marks:
        return [Choice(OrthogonalFixingOnes(n), roles)] if n > 2 else []
    return [Choice(Orthogonal(n), roles)]


def _support(powers: Powers) -> int:
    return len(powers)


def _roles(candidates: Iterable[Exponents], readers: Collection[int]) -> dict[int, int]:
    """All leaves that write or read, by independent solutions; each so that linear maps read.

    A tied head leaves several: what an encoder and what a decoder write says nothing of the other.
    """
    roles: dict[int, int] = {}
    for one in sorted(_unit(candidates), key=_support, reverse=True):
        if not roles.keys() & one.keys():
            reading = sum(one[number] for number in one.keys() & readers)
            roles |= {number: -power if reading > 0 else power for number, power in one.items()}
    return roles


def _unit(candidates: Iterable[Mapping[int, Fraction]]) -> list[Powers]:
    """Solutions in which every leaf scales by the first power, its inverse, or not at all."""
    kept = []
    for one in candidates:
        if one and all(abs(power) == 1 for power in one.values()):
            first = one[min(one)]
            kept.append({number: int(power * first) for number, power in one.items()})
    return kept


def _even(powers: Powers, equations: Iterable[Exponents]) -> bool:
    """Whether negative scales are allowed as well."""
    return all(
        sum(power * abs(powers.get(unknown, 0)) for unknown, power in equation.items()) % 2 == 0
        for equation in equations
    )


def _with_roles(signs: set[int], roles: Powers) -> Powers:
    return {number: roles.get(number, 1) or 1 for number in signs}


def solutions(
    numbers: Sequence[int], equations: Iterable[Exponents]
) -> list[Mapping[int, Fraction]]:
    """A basis of the powers that satisfy all equations."""
    pivots: dict[int, dict[int, Fraction]] = {}
    for equation in {frozenset(one.items()) for one in equations}:
        row = _reduced(dict(equation), pivots)
        if row:
            pivot = max(row)  # so that earlier leaves are free, and written
            row = {unknown: power / row[pivot] for unknown, power in row.items()}
            for other, own in pivots.items():
                if pivot in own:
                    pivots[other] = _minus(own, row, own[pivot])
            pivots[pivot] = row
    free = [number for number in numbers if number not in pivots]
    basis = []
    for number in free:
        own = {pivot: -row[number] for pivot, row in pivots.items() if number in row}
        basis.append({number: Fraction(1), **own})
    return basis


def _reduced(
    row: dict[int, Fraction], pivots: Mapping[int, dict[int, Fraction]]
) -> dict[int, Fraction]:
    for unknown in [one for one in row if one in pivots]:
        if unknown in row:
            row = _minus(row, pivots[unknown], row[unknown])
    return row


def _minus(
    row: Mapping[int, Fraction], other: Mapping[int, Fraction], factor: Fraction
) -> dict[int, Fraction]:
    total = dict(row)
    for unknown, power in other.items():
        total[unknown] = total.get(unknown, Fraction(0)) - factor * power
    return {unknown: power for unknown, power in total.items() if power}


def parity_solutions(numbers: Sequence[int], equations: Iterable[Exponents]) -> list[set[int]]:
    """The same for signs: sets of leaves that may change sign together."""
    pivots: dict[int, set[int]] = {}
    for equation in equations:
        row = {unknown for unknown, power in equation.items() if power % 2}
        for unknown in sorted(row & pivots.keys()):
            if unknown in row:
                row = row ^ pivots[unknown]
        if row:
            pivot = max(row)
            for other in [one for one, own in pivots.items() if pivot in own]:
                pivots[other] = pivots[other] ^ row
            pivots[pivot] = row
    free = [number for number in numbers if number not in pivots]
    return [{number} | {pivot for pivot, row in pivots.items() if number in row} for number in free]
