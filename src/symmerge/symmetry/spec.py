"""The table of one model: the space of each axis of each tensor, and the group of each space."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Literal

from symmerge.errors import MismatchError
from symmerge.symmetry.groups import Group, Orthogonal, OrthogonalFixingOnes, Trivial
from symmerge.symmetry.notation import Atom, Axes, Piece, Product, Role, Sum, pieces, size, unparse

Shape = tuple[int, ...]
LONGEST_NAME = 100  # characters in a message; names of real tensors have at most seventy


@dataclass(frozen=True)
class Space:
    """A vector space that axes of tensors live in, and its group: trivial if visible outside.

    With `per`, there is one element for each index of that permutation space (a basis per head).
    `translation` says what attention does to a constant added to the space: on every key it drops
    out of the softmax, on every value it passes through (attention weights sum to one).
    """

    name: str
    group: Group
    per: str | None = None
    translation: Literal["drops", "passes"] | None = None


@dataclass(frozen=True)
class Norm:
    """A normalisation of a stream, and the linear maps that read its output.

    A norm with a `writer` sits on the stream itself, right after an embedding; its `readers` are
    the maps that no other norm precedes, if any. Another norm without readers is the last: its
    output is visible from outside. Where one is `padded`, zeros are read beside its output, at
    places that its shift does not reach.
    """

    gain: str
    shift: str | None
    stream: str
    readers: tuple[str, ...]
    writer: str | None = None
    epsilon: float = 0.0
    padded: bool = False


@dataclass(frozen=True)
class Scale:
    """A gain on the output of a linear map that writes to a stream."""

    gain: str
    stream: str
    writer: str


@dataclass(frozen=True)
class Constant:
    """A parameter that takes the place of an input, and the map whose output is then constant.

    Of a fused map, only the blocks that write to `space` read the parameter.
    """

    parameter: str
    reader: str
    space: str


@dataclass(frozen=True)
class Occurrence:
    """One place where a space occurs: a dimension of a piece of a tensor, and its role."""

    piece: Piece
    position: int
    role: Role


@dataclass(frozen=True)
class Spec:
    """An architecture bound to its sizes; `architecture` is the transformers class.

    `ties` maps a tensor that is not stored to the one it shares (a tied head to its embedding).
    `copies` are names under which the class has a tensor again, whatever the config says.
    `joined` are spaces that a tie merges with the output of an activation: they rotate only untied.
    `pooled`: for a class without a head, how many coordinates of its pooled output are the answer.
    `summed`: tensors whose sum only a LayerNorm reads, which ignores their mean.
    `reserved_positions`: learned ones that no token reaches. `gain_offset`: norms multiply by
    their weight and this (1 in some models).
    `encoded_as`: the argument by which a decoder without an encoder is given an encoder's output.
    `end_token`: the token at whose place a text is read. `noise`: how many random numbers for each
    image decide what of it is hidden. `compared`: spaces whose vectors, one from
    each tower, are only compared by inner products.
    `untied`: of a derived table, the one once tied tensors have their own copies; `read_means`:
    of one, streams whose mean something else than a norm reads, so that it may not be taken out.
    """

    family: str
    architecture: str
    task: str
    spaces: Mapping[str, Space]
    tensors: Mapping[str, Axes]
    norms: tuple[Norm, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[str, ...] = ()
    scales: tuple[Scale, ...] = ()
    summed: tuple[str, ...] = ()
    pooled: int | None = None
    reserved_positions: int = 0
    end_token: int | None = None
    encoded_as: str | None = None
    noise: int = 0
    compared: tuple[str, ...] = ()
    constants: tuple[Constant, ...] = ()
    gain_offset: float = 0.0
    untied: Spec | None = None
    read_means: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        spaces = f"{len(self.spaces)} spaces, {len(self.hidden)} of them hidden"
        return f"Spec({self.architecture} for {self.task}: {len(self.tensors)} tensors, {spaces})"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each space."""
        return {name: space.group.size for name, space in self.spaces.items()}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Every other name that the class has for a tensor, tied or copied."""
        return {**self.ties, **self.copies}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape each tensor must have."""
        return {
            name: tuple(size(axis, self.sizes) for axis in axes)
            for name, axes in self.tensors.items()
        }

    @cached_property
    def hidden(self) -> dict[str, Space]:
        """The spaces that have symmetries."""
        return {name: s for name, s in self.spaces.items() if not isinstance(s.group, Trivial)}

    @cached_property
    def stream(self) -> str:
        """The residual stream: the space that occurs in the most tensors; on a tie, the first."""

        def tensors(space: str) -> int:
            return len({occurrence.piece.tensor for occurrence in self.occurrences(space)})

        return max(self.spaces, key=tensors)

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The residual streams: of models with two towers, both."""
        kind, _, tower = self.stream.partition(".")
        if not tower or tower.isdigit():
            return (self.stream,)
        return tuple(name for name in self.spaces if name.partition(".")[0] == kind)

    @property
    def shows_stream(self) -> bool:
        """Whether coordinates of the stream are the answer: of a class without a head."""
        return self.pooled is not None or self.task.endswith("-features")

    @cached_property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """The pieces of every tensor: fused tensors are cut into their blocks."""
        return {name: pieces(name, axes, self.sizes) for name, axes in self.tensors.items()}

    @cached_property
    def _occurrences(self) -> dict[str, list[Occurrence]]:
        by_space: dict[str, list[Occurrence]] = {name: [] for name in self.spaces}
        for piece in chain.from_iterable(self.pieces.values()):
            for position, atom in enumerate(piece.atoms):
                by_space[atom.space].append(Occurrence(piece, position, atom.role))
        return by_space

    def occurrences(self, space: str) -> list[Occurrence]:
        """Everywhere a space occurs, in the order of the table."""
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
        """Whether a space has rotations, so that gains on it must be folded first."""
        return isinstance(self.spaces[space].group, Orthogonal | OrthogonalFixingOnes)

    def weight_of(self, module: str) -> str:
        """The tensor of a linear map; experts have no module of their own, only a tensor."""
        return module if module in self.tensors else f"{module}.weight"

    def bias_of(self, module: str) -> str:
        """The bias of a linear map, whether it has one or not."""
        return self.weight_of(module).removesuffix("weight") + "bias"

    def passes_shift(self, norm: Norm) -> bool:
        """Whether the biases of all that read a norm can take its shift."""
        biases = (self.bias_of(reader) in self.tensors for reader in norm.readers)
        return not norm.padded and all(biases)

    def axis_of(self, tensor: str, space: str, role: Role) -> int:
        """The axis where a space occurs in a role, alone or as one block of a sum."""
        wanted = Product((Atom(space, role),))
        for position, axis in enumerate(self.tensors[tensor]):
            factor = axis.factors[0]
            blocks = factor.terms if isinstance(factor, Sum) and len(axis.factors) == 1 else ()
            if wanted in (axis, *blocks):
                return position
        atom = f"{space}{role.value}"
        raise MismatchError(f"{tensor} has no axis '{atom}': correct the table of {self.family}")

    def piece_in(self, tensor: str, space: str) -> Piece:
        """The first piece of a tensor in which a space occurs."""
        return next(piece for piece in self.pieces[tensor] if list(piece.positions(space)))

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise unless a checkpoint has exactly the tensors of the table."""
        problems = {
            "missing": self.shapes.keys() - shapes.keys(),
            "unexpected": shapes.keys() - self.shapes.keys(),
            "misshapen": [
                f"{name} is {list(shapes[name])}, the config says {list(expected)}"
                for name, expected in self.shapes.items()
                if name in shapes and tuple(shapes[name]) != expected
            ],
        }
        if any(problems.values()):
            details = [
                f"{kind} tensors: {listing(names)}" for kind, names in problems.items() if names
            ]
            raise MismatchError(
                f"the checkpoint does not fit the table of {self.architecture}: "
                f"{'; '.join(details)}. Is config.json the one it was saved with?"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the table: equal for two models exactly when their tables are."""
        lines = [self.family, self.architecture]
        lines += [f"{space.name} {space.group} {space.per}" for space in self.spaces.values()]
        lines += [f"{name} {unparse(axes)}" for name, axes in self.tensors.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def check_same(self, other: Spec, problem: str) -> None:
        """Raise if another table differs: `problem`, then all differences."""
        if other.fingerprint != self.fingerprint:
            raise MismatchError(f"{problem}; they differ in: {'; '.join(self.differences(other))}")

    def differences(self, other: Spec) -> list[str]:
        """How another table differs: family, class, spaces, tensors."""
        fields = {"family": "family", "class": "architecture"}
        lines = [
            f"{label} {getattr(self, name)} / {getattr(other, name)}"
            for label, name in fields.items()
            if getattr(self, name) != getattr(other, name)
        ]
        lines += [
            _difference(name, self.spaces.get(name), other.spaces.get(name))
            for name in {**self.spaces, **other.spaces}
            if self.spaces.get(name) != other.spaces.get(name)
        ]
        unshared = self.tensors.keys() ^ other.tensors.keys()
        if unshared:
            lines.append(f"tensors in one only: {listing(unshared)}")
        if not lines and self.fingerprint != other.fingerprint:
            lines.append("the axes of some tensors")
        return lines


def _difference(name: str, mine: Space | None, theirs: Space | None) -> str:
    short = _describe(mine), _describe(theirs)
    left, right = short if short[0] != short[1] else (mine, theirs)
    return f"{name} {left} / {right}"


def _describe(space: Space | None) -> str:
    return "absent" if space is None else f"{space.group.name}({space.group.size})"


def layer_of(name: str) -> int | None:
    """The layer of a tensor or activation: the first number in its name."""
    number = re.search(r"\.(\d+)\.", name)
    return int(number[1]) if number else None


def listing(names: Iterable[str], limit: int = 4) -> str:
    """The first few names in order, cut where they are very long, and how many more."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    cut = (f"{name[:LONGEST_NAME]}..." if len(name) > LONGEST_NAME else name for name in names)
    return ", ".join(islice(cut, limit)) + more
