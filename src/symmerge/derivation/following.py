"""Which leaves are one space, and what each operation allows them: unions, equations and marks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, pairwise
from typing import Literal

import torch
from torch import Tensor

from symmerge.derivation.terms import (
    SYSTEMS,
    Axis,
    Blocks,
    Cut,
    Exponents,
    Factor,
    Leaf,
    Met,
    Plain,
    Refine,
    Unfollowed,
    Versions,
    Which,
    instantiate,
    length,
    mets,
    tidy,
)

Mode = Literal["add", "multiply", "contract", "inner", "gain"]
ZERO: Exponents = {}
# What an operation does to a space, beyond equations between scales: see `Following.mark`.
POINTWISE, LENGTH, MEAN, FIXED, INNER = "pointwise", "length", "mean", "fixed", "inner"


@dataclass
class Site:
    """A parameter that multiplies a space pointwise, and who reads the product.

    It can be folded if only linear maps do, or into the map that it follows. That of a LayerNorm
    right after an `embedding` can be absorbed into it if what is added to it is normed again.
    """

    gain: str
    leaf: Leaf
    shift: str | None = None
    readers: list[str] = field(default_factory=list)
    writer: str | None = None
    foldable: bool = True
    embedding: str | None = None
    epsilon: float = 0.0
    absorbable: bool = True


@dataclass(frozen=True)
class State:
    """A tensor while it is followed.

    `parameter`: it is this parameter, reshaped. `embedding`: rows of this one. `site`: the output
    of a gain. `square`: it was squared, and what squares allow is not decided yet. `writer`: the
    output of this linear map. `rows`: a choice among the first axis of this parameter (experts).
    `zero`: all its numbers are, as where the state of a recurrence begins.
    """

    axes: tuple[Axis, ...]
    parameter: str | None = None
    site: Site | None = None
    square: bool = False
    writer: str | None = None
    embedding: str | None = None
    rows: str | None = None
    zero: bool = False

    def mets(self) -> Iterator[Met]:
        """Every leaf of the tensor."""
        for axis in self.axes:
            yield from mets(axis)

    def reshaped(self, axes: Iterable[Axis]) -> State:
        """The same values with other axes."""
        return replace(self, axes=tuple(tidy(axis) for axis in axes))


class Following:
    """One run over a recording: leaves that are one space, equations, marks, sites."""

    def __init__(self) -> None:
        self.numbers, self.groups = count(), count()
        self.leaves: list[Leaf] = []
        self.parents: dict[int, int] = {}
        self.marks: dict[int, set[str]] = {}
        self.equations: dict[str, list[Exponents]] = {name: [] for name in SYSTEMS}
        self.sites: list[Site] = []
        self.apart: set[tuple[int, int]] = set()
        self.readers: set[int] = set()  # leaves by which a linear map reads
        self.notes: list[str] = []

    def parameter(self, name: str, cuts: Iterable[Cut]) -> State:
        """The state of a parameter."""
        axes = tuple(instantiate(cut, (name, at), self.numbers) for at, cut in enumerate(cuts))
        for axis in axes:
            for met in mets(axis):
                self.leaves.append(met.leaf)
                self.parents[met.leaf.number] = met.leaf.number
                self.marks[met.leaf.number] = set()
        return State(axes, parameter=name)

    def root(self, number: int) -> int:
        """The representative of a leaf's space."""
        while self.parents[number] != number:
            self.parents[number] = self.parents[self.parents[number]]
            number = self.parents[number]
        return number

    def unite(self, one: Leaf, other: Leaf) -> None:
        """Both leaves are one space."""
        a, b = sorted((self.root(one.number), self.root(other.number)))
        if a != b:
            self.parents[b] = a
            self.marks[a] |= self.marks.pop(b)

    def mark(self, met: Met, *marks: str) -> None:
        """What an operation does to a space: it loses the groups that this excludes."""
        self.marks[self.root(met.leaf.number)].update(marks)

    def vanish(self, exponents: Exponents, system: str) -> None:
        """An equation: this sum of powers is zero."""
        if any(exponents.values()):
            self.equations[system].append(exponents)

    def still(self, met: Met, *marks: str) -> None:
        """Neither scales nor signs may reach this tensor."""
        self.vanish(met.scale, "scale")
        self.vanish(met.sign, "sign")
        self.mark(met, *marks)

    def freeze(self, axes: Iterable[Axis]) -> None:
        """Nothing may move here."""
        for axis in axes:
            for met in mets(axis):
                self.still(met, FIXED)

    # two axes that meet

    def match(self, one: Axis, other: Axis, mode: Mode) -> Axis:
        """The axis of the result where two axes meet; what differs in cut is cut finer first."""
        left, right = list(tidy(one)), list(tidy(other))
        if length(left) != length(right):
            if length(left) == 1 or length(right) == 1:  # broadcast
                wide = left or right
                left, right = (side or [Plain(length(wide), free=True)] for side in (left, right))
            else:
                raise Unfollowed("axes of different sizes meet")
        result: list[Factor] = []
        while left and right:
            a, b = left.pop(0), right.pop(0)
            a, b, rest_a, rest_b = self._alike(a, b)
            left[:0], right[:0] = rest_a, rest_b
            result.append(self._meet(a, b, mode))
        return tidy(result)

    def _alike(self, a: Factor, b: Factor) -> tuple[Factor, Factor, Axis, Axis]:
        """Two factors of one size: the larger one is split."""
        if a.size == b.size:
            return a, b, (), ()
        large, small = (a, b) if a.size > b.size else (b, a)
        if large.size % small.size:
            raise Unfollowed("axes that are cut differently meet")
        inner = large.size // small.size
        if isinstance(large, Met):
            raise Refine(large.leaf, ("product", (small.size, inner)))
        if isinstance(large, Blocks) and isinstance(small, Met):
            self._cut_outer(small, [length(part) for part in large.parts], large.size)
        if not isinstance(large, Plain):
            raise Unfollowed("axes that are cut differently meet")
        parts = Plain(small.size, large.free), (Plain(inner, large.free),)
        return (parts[0], b, parts[1], ()) if large is a else (a, parts[0], (), parts[1])

    def _cut_outer(self, small: Met, sizes: list[int], total: int) -> None:
        inner = total // small.size
        if any(size % inner for size in sizes):
            raise Unfollowed("axes that are cut differently meet")
        raise Refine(small.leaf, ("sum", tuple(size // inner for size in sizes)), outer=True)

    def _meet(self, a: Factor, b: Factor, mode: Mode) -> Factor:
        if isinstance(a, Plain) or isinstance(b, Plain):
            return self._meet_plain(a, b, mode)
        if isinstance(a, Met) and isinstance(b, Met):
            return self._meet_leaves(a, b, mode)
        if isinstance(a, Met | Blocks) and isinstance(b, Met | Blocks):
            return Blocks(tuple(self._meet_blocks(a, b, mode)))
        if isinstance(a, Versions) and isinstance(b, Versions):
            pairs = zip(a.options, b.options, strict=True)
            return Versions(a.group, tuple(self.match(x, y, mode) for x, y in pairs))
        if isinstance(a, Which) and isinstance(b, Which):
            return a
        raise Unfollowed("axes that are cut differently meet")

    def _meet_blocks(self, a: Met | Blocks, b: Met | Blocks, mode: Mode) -> Iterator[Axis]:
        sizes = [
            [length(part) for part in side.parts] if isinstance(side, Blocks) else [side.size]
            for side in (a, b)
        ]
        if sizes[0] != sizes[1]:
            for side, own, others in ((a, sizes[0], sizes[1]), (b, sizes[1], sizes[0])):
                cut_at(side, own, others)
            raise Unfollowed("blocks that overlap meet")
        assert isinstance(a, Blocks) and isinstance(b, Blocks)
        for x, y in zip(a.parts, b.parts, strict=True):
            yield self.match(x, y, mode)

    def _meet_plain(self, a: Factor, b: Factor, mode: Mode) -> Factor:
        """A leaf meets data or a constant, which does not transform."""
        if isinstance(a, Plain) and isinstance(b, Plain):
            return Plain(a.size, a.free and b.free)
        plain, other = (a, b) if isinstance(a, Plain) else (b, a)
        assert isinstance(plain, Plain)
        if isinstance(other, Which):
            return other
        for met in mets((other,)):
            if mode in ("add", "contract", "inner"):
                self.still(met, MEAN if plain.free else FIXED)
            elif not plain.free:
                self.mark(met, FIXED)
        if mode in ("add", "contract", "inner") and not plain.free:
            return Plain(other.size)  # nothing moves there any more
        return other

    def _meet_leaves(self, a: Met, b: Met, mode: Mode) -> Met:
        self.unite(a.leaf, b.leaf)
        if mode == "add":
            for system in SYSTEMS:
                self.vanish(minus(getattr(a, system), getattr(b, system)), system)
            return a
        if mode in ("contract", "inner"):
            for system in SYSTEMS:
                # what rotates or permutes may meet itself: both sides write, as a norm reads both
                both = minus if mode == "inner" and system == "role" else plus
                self.vanish(both(getattr(a, system), getattr(b, system)), system)
            return a
        if mode == "gain":  # b rides along
            for system in SYSTEMS:
                self.vanish(getattr(b, system), system)
            return a
        self.mark(a, POINTWISE)
        return a.with_exponents(
            scale=plus(a.scale, b.scale), sign=plus(a.sign, b.sign), role=plus(a.role, b.role)
        )


def cut_at(side: Met | Blocks, own: list[int], others: list[int]) -> None:
    """Cut a leaf where the other side has a border."""
    borders = _borders(others)
    start = 0
    for at, size in enumerate(own):
        inside = [border - start for border in borders if start < border < start + size]
        if inside:
            axis = (side,) if isinstance(side, Met) else side.parts[at]
            request_cut(axis, inside)
        start += size


def _borders(sizes: Iterable[int]) -> list[int]:
    total, borders = 0, []
    for size in sizes:
        total += size
        borders.append(total)
    return borders


def request_cut(axis: Axis, borders: Iterable[int]) -> None:
    """Cut the outermost leaf of an axis so that blocks begin at these places."""
    total = length(axis)
    points = sorted({0, *borders, total})
    first = axis[0]
    inner = total // first.size
    sizes = [end - start for start, end in pairwise(points)]
    if not isinstance(first, Met) or any(size % inner for size in sizes):
        raise Unfollowed("a block begins inside a factor")
    raise Refine(first.leaf, ("sum", tuple(size // inner for size in sizes)), outer=inner > 1)


def plus(a: Exponents, b: Exponents, factor: int = 1) -> Exponents:
    """The sum of two exponents."""
    total = dict(a)
    for unknown, power in b.items():
        total[unknown] = total.get(unknown, Fraction(0)) + factor * power
    return {unknown: power for unknown, power in total.items() if power}


def minus(a: Exponents, b: Exponents) -> Exponents:
    """Their difference."""
    return plus(a, b, -1)


def times(a: Exponents, factor: Fraction) -> Exponents:
    """A multiple."""
    return {unknown: power * factor for unknown, power in a.items() if power * factor}


def constant_axes(tensor: Tensor) -> tuple[Axis, ...]:
    """The axes of a constant: free where it is the same all along."""
    axes: list[Axis] = []
    for at, size in enumerate(tensor.shape):
        first = tensor.narrow(at, 0, 1) if size else tensor
        same = size > 0 and bool(torch.equal(first.expand_as(tensor), tensor))
        axes.append(tidy((Plain(size, free=same),)))
    return tuple(axes)


Rule = Callable[..., object]
Rules = Mapping[str, Rule]
