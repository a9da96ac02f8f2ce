"""The table of one model: which space each axis of each tensor lives in, and which group each space has."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from symmerge.errors import MismatchError
from symmerge.symmetry.groups import Group, Orthogonal, OrthogonalFixingOnes, Trivial
from symmerge.symmetry.notation import Atom, Axes, Piece, Product, Role, Sum, pieces, size

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """A vector space inside the network that nobody outside can see.

    `per` names a permutation space: there is one element for each of its indices (one basis per head).
    `translation` says what attention does to a constant added to the space: a constant on every key drops out of the softmax
    ("drops"), a constant on every value passes through because attention weights sum to one ("passes").
    """

    name: str
    group: Group
    per: str | None = None
    translation: Literal["drops", "passes"] | None = None


@dataclass(frozen=True)
class Norm:
    """A normalisation of a stream, and the linear maps that read what it gives.

    One with a `writer` sits on the stream itself, between an embedding and everyone; its `readers` are those that no other norm precedes. One without
    readers is the last: the outside reads what it shows of the stream, and nobody the rest.
    """

    gain: str
    shift: str | None
    stream: str
    readers: tuple[str, ...]
    writer: str | None = None
    epsilon: float = 0.0


@dataclass(frozen=True)
class Scale:
    """A gain on what a linear map writes to a stream."""

    gain: str
    stream: str
    writer: str


@dataclass(frozen=True)
class Occurrence:
    """One place where a space is met: a piece of a tensor, one of its dimensions, and its role there."""

    piece: Piece
    position: int
    role: Role


@dataclass(frozen=True)
class Spec:
    """An architecture bound to its sizes.

    `ties` maps a tensor that is not stored to the one it shares (a tied head to its embedding); `joined` are spaces that a tie makes
    one with the output of an activation: they rotate only untied. `architecture` is the transformers class, `task` what it is for. `pooled` is how
    many of the coordinates it pools are the answer of a class without a head.
    """

    family: str
    architecture: str
    task: str
    spaces: Mapping[str, Space]
    tensors: Mapping[str, Axes]
    norms: tuple[Norm, ...] = ()
    ties: Mapping[str, str] = ()  # type: ignore[assignment]
    joined: tuple[str, ...] = ()
    scales: tuple[Scale, ...] = ()
    pooled: int | None = None

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {name: space.group.size for name, space in self.spaces.items()}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape each tensor must have."""
        return {
            name: tuple(size(axis, self.sizes) for axis in axes)
            for name, axes in self.tensors.items()
        }

    @cached_property
    def hidden(self) -> dict[str, Space]:
        """The spaces that can move at all."""
        return {
            name: space
            for name, space in self.spaces.items()
            if not isinstance(space.group, Trivial)
        }

    @cached_property
    def stream(self) -> str:
        """The residual stream: the space that most tensors meet; the first one, where another lies beside it."""
        return max(
            self.spaces, key=lambda name: len({met.piece.tensor for met in self.occurrences(name)})
        )

    @cached_property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Every tensor, cut where it is fused."""
        return {name: pieces(name, axes, self.sizes) for name, axes in self.tensors.items()}

    @cached_property
    def _occurrences(self) -> dict[str, list[Occurrence]]:
        found: dict[str, list[Occurrence]] = {name: [] for name in self.spaces}
        for cut in self.pieces.values():
            for piece in cut:
                for position, atom in enumerate(piece.atoms):
                    found[atom.space].append(Occurrence(piece, position, atom.role))
        return found

    def occurrences(self, space: str) -> list[Occurrence]:
        """Everywhere a space is met, in the order of the table."""
        return self._occurrences[space]

    def batch(self, space: str) -> Shape:
        """The batch dimensions of a space's element: one per index of the space it is `per`."""
        per = self.spaces[space].per
        return () if per is None else (self.sizes[per],)

    def ordered(self) -> Iterator[Space]:
        """The hidden spaces, outer ones before those that are `per` them."""
        yield from (space for space in self.hidden.values() if space.per is None)
        yield from (space for space in self.hidden.values() if space.per is not None)

    def rotates(self, space: str) -> bool:
        """Whether a space turns by whole rotations, so that gains on it must be folded first."""
        return isinstance(self.spaces[space].group, Orthogonal | OrthogonalFixingOnes)

    def axis_of(self, tensor: str, space: str, role: Role) -> int:
        """Which axis of a tensor meets a space in a role; the axis must be nothing else, but for what lies beside it."""
        for position, axis in enumerate(self.tensors[tensor]):
            factor = axis.factors[0]
            if Product((Atom(space, role),)) in (
                axis,
                *(factor.terms if isinstance(factor, Sum) and len(axis.factors) == 1 else ()),
            ):
                return position
        raise MismatchError(
            f"{tensor} has no axis '{space}{role.value}': the table of {self.family} declares it as a reader of that space"
        )

    def part(self, tensor: str, space: str) -> Piece:
        """The piece of a tensor that meets a space."""
        return next(
            piece for piece in self.pieces[tensor] if space in [atom.space for atom in piece.atoms]
        )

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Refuse a checkpoint whose tensors are not the table's: names what is missing, unexpected or misshapen."""
        missing, unexpected = self.shapes.keys() - shapes.keys(), shapes.keys() - self.shapes.keys()
        misshapen = [
            f"{name} is {list(shapes[name])}, the config says {list(expected)}"
            for name, expected in self.shapes.items()
            if name in shapes and tuple(shapes[name]) != expected
        ]
        problems = [
            f"missing tensors: {listing(missing)}" if missing else "",
            f"unexpected tensors: {listing(unexpected)}" if unexpected else "",
            f"misshapen tensors: {listing(misshapen)}" if misshapen else "",
        ]
        if any(problems):
            raise MismatchError(
                f"the checkpoint does not fit the table of {self.architecture}: {'; '.join(filter(None, problems))}. Is config.json the one it was saved with?"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two models exactly when their tables are."""
        lines = [self.family, self.architecture]
        lines += [f"{space.name} {space.group} {space.per}" for space in self.spaces.values()]
        lines += [f"{name} {text(axes)}" for name, axes in self.tensors.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def check_same(self, other: Spec, problem: str) -> None:
        """Refuse another table: `problem`, then everything in which the two differ."""
        if other.fingerprint != self.fingerprint:
            raise MismatchError(f"{problem}; they differ in: {'; '.join(self.differences(other))}")

    def differences(self, other: Spec) -> list[str]:
        """In words, how another table differs: family, class, sizes, groups, tensors."""
        found = [
            f"{field} {mine} / {theirs}"
            for field, mine, theirs in (
                ("family", self.family, other.family),
                ("class", self.architecture, other.architecture),
            )
            if mine != theirs
        ]
        for name in [*self.spaces, *(name for name in other.spaces if name not in self.spaces)]:
            mine, theirs = self.spaces.get(name), other.spaces.get(name)
            if mine != theirs:
                words = _describe(mine), _describe(theirs)
                found.append(
                    f"{name} {words[0]} / {words[1]}"
                    if words[0] != words[1]
                    else f"{name} {mine} / {theirs}"
                )
        only = [
            *(self.tensors.keys() - other.tensors.keys()),
            *(other.tensors.keys() - self.tensors.keys()),
        ]
        if only:
            found.append(f"tensors in one only: {listing(only)}")
        if not found and self.fingerprint != other.fingerprint:
            found.append("the axes of some tensors")
        return found


def layer_of(name: str) -> int | None:
    """The layer a tensor (or what flows past it) belongs to: the first number in its name."""
    number = re.search(r"\.(\d+)\.", name)
    return int(number[1]) if number else None


def listing(names, most: int = 4) -> str:
    """A few names and how many more."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _describe(space: Space | None) -> str:
    return "absent" if space is None else f"{space.group.name}({space.group.size})"


def text(axes: Axes) -> str:
    """Axes back in the notation."""
    return " ".join(_text(axis) for axis in axes)


def _text(axis: Product | Sum) -> str:
    if isinstance(axis, Sum):
        return "(" + " + ".join(_text(term) for term in axis.terms) + ")"
    parts = [_text(factor) if isinstance(factor, Sum) else str(factor) for factor in axis.factors]
    return parts[0] if len(parts) == 1 else "(" + " ".join(parts) + ")"
