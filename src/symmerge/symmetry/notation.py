"""The notation of the architecture tables: ``(kv q qk) residual*`` -> axes -> pieces.

An axis writes to a space (``s``), reads from it (``s*``) or rides along pointwise (``s~``). Juxtaposition inside parentheses
is a product, outer first; ``+`` is a direct sum, for fused matrices: ``((h qk) + (h qk*) + (h vo))`` is GPT-2's QKV and
``(h (qk + qk* + vo))`` GPT-NeoX's, which interleaves the three inside every head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product as cartesian
from math import prod

from torch import Tensor

from symmerge.errors import NotationError


class Role(Enum):
    """How an axis moves when its space changes basis by g."""

    WRITES = ""  # by g
    READS = "*"  # by the inverse transpose of g
    RIDES = "~"  # pointwise: follows a permutation, never a sign, a scale or a rotation


@dataclass(frozen=True)
class Atom:
    """One space in one role: the smallest axis."""

    space: str
    role: Role

    def __str__(self) -> str:
        return self.space + self.role.value


@dataclass(frozen=True)
class Product:
    """Factors of one axis, outer first."""

    factors: tuple[Atom | Sum, ...]


@dataclass(frozen=True)
class Sum:
    """Blocks that follow each other along one axis."""

    terms: tuple[Product, ...]


Axes = tuple[Product, ...]

_TOKEN = re.compile(r"\s*([()+]|[A-Za-z_][\w.]*[*~]?)")


def parse(text: str) -> Axes:
    """Read the axes of one tensor.

    >>> [str(factor) for factor in parse("(kv q qk) residual*")[0].factors]
    ['kv', 'q', 'qk']
    """
    tokens = _tokens(text)
    axes: list[Product] = []
    while tokens:
        factor = _factor(tokens, text)
        axes.append(factor if isinstance(factor, Product) else Product((factor,)))
    if not axes:
        raise NotationError(
            f"no axis in '{text}': write one space per axis, for example 'ff residual*'"
        )
    return tuple(axes)


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if not match:
            raise NotationError(
                f"cannot read '{text[position:].strip()}' in '{text}': expected a space name, '(', ')' or '+'"
            )
        tokens.append(match[1])
        position = match.end()
    return tokens[::-1]  # a stack: the next token is the last


def _factor(tokens: list[str], text: str) -> Atom | Product | Sum:
    token = tokens.pop()
    if token == "(":
        return _parenthesis(tokens, text)
    if token in ")+":
        raise NotationError(f"unexpected '{token}' in '{text}'")
    return Atom(token.rstrip("*~"), Role(token[-1] if token[-1] in "*~" else ""))


def _parenthesis(tokens: list[str], text: str) -> Product | Sum:
    terms: list[list[Atom | Sum]] = [[]]
    while tokens and tokens[-1] != ")":
        if tokens[-1] == "+":
            tokens.pop()
            terms.append([])
            continue
        factor = _factor(tokens, text)
        terms[-1].extend(factor.factors if isinstance(factor, Product) else [factor])
    if not tokens:
        raise NotationError(f"'(' is never closed in '{text}'")
    tokens.pop()
    if not all(terms):
        raise NotationError(f"an empty block in '{text}'")
    products = tuple(Product(tuple(term)) for term in terms)
    return products[0] if len(products) == 1 else Sum(products)


def atoms(axes: Axes) -> Iterator[Atom]:
    """Every atom of a tensor, in order, through sums and products.

    >>> " ".join(str(atom) for atom in atoms(parse("((h qk) + (h vo)) residual*")))
    'h qk h vo residual*'
    """
    for axis in axes:
        for factor in axis.factors:
            if isinstance(factor, Atom):
                yield factor
            else:
                yield from atoms(factor.terms)


def size(axis: Product | Sum | Atom, sizes: Mapping[str, int]) -> int:
    """How long an axis is, given how large each space is.

    >>> size(parse("(h (qk + qk* + vo))")[0], {"h": 4, "qk": 8, "vo": 8})
    96
    """
    if isinstance(axis, Atom):
        return sizes[axis.space]
    if isinstance(axis, Sum):
        return sum(size(term, sizes) for term in axis.terms)
    return prod(size(factor, sizes) for factor in axis.factors)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that has no sums: a view whose dimensions are the atoms, one each."""

    tensor: str
    atoms: tuple[Atom, ...]
    steps: tuple[tuple[str, int, tuple[int, ...]], ...]

    def view(self, tensor: Tensor) -> Tensor:
        """The piece's own entries, one dimension per atom; shares memory with the tensor."""
        for verb, dim, numbers in self.steps:
            tensor = (
                tensor.unflatten(dim, numbers)
                if verb == "unflatten"
                else tensor.narrow(dim, *numbers)
            )
        return tensor

    def positions(self, space: str) -> Iterator[int]:
        """Which of the piece's dimensions live in a space."""
        return (position for position, atom in enumerate(self.atoms) if atom.space == space)


def pieces(tensor: str, axes: Axes, sizes: Mapping[str, int]) -> tuple[Piece, ...]:
    """Cut a tensor into pieces without sums; a tensor without sums is one piece.

    >>> [" ".join(map(str, piece.atoms)) for piece in pieces("qkv", parse("(h (qk + qk* + vo)) d*"), {"h": 2, "qk": 4, "vo": 4, "d": 8})]
    ['h qk d*', 'h qk* d*', 'h vo d*']
    """
    return tuple(
        _piece(tensor, choice, sizes)
        for choice in cartesian(*(_choices(axis, sizes) for axis in axes))
    )


_Choice = tuple[tuple[Atom | tuple[int, Product], ...], tuple[int, ...]]


def _choices(axis: Product, sizes: Mapping[str, int]) -> list[_Choice]:
    """Every way to pick one term from each sum of an axis: the factors picked, and the sizes of the whole factors."""
    whole = tuple(size(factor, sizes) for factor in axis.factors)
    options: list[list[Atom | tuple[int, Product]]] = []
    for factor in axis.factors:
        if isinstance(factor, Atom):
            options.append([factor])
            continue
        start, blocks = 0, []
        for term in factor.terms:
            blocks.append((start, term))
            start += size(term, sizes)
        options.append(blocks)
    return [(picked, whole) for picked in cartesian(*options)]


def _piece(tensor: str, choice: tuple[_Choice, ...], sizes: Mapping[str, int]) -> Piece:
    found: list[Atom] = []
    steps: list[tuple[str, int, tuple[int, ...]]] = []
    for picked, whole in choice:
        base = len(found)
        if len(whole) > 1:
            steps.append(("unflatten", base, whole))
        for factor in picked:
            if isinstance(factor, Atom):
                found.append(factor)
                continue
            start, term = factor
            steps.append(("narrow", len(found), (start, size(term, sizes))))
            inner = [item for item in term.factors if isinstance(item, Atom)]
            if len(inner) != len(term.factors):
                raise NotationError(f"{tensor}: a sum inside a sum; write it as one sum")
            if len(inner) > 1:
                steps.append(("unflatten", len(found), tuple(size(item, sizes) for item in inner)))
            found.extend(inner)
    return Piece(tensor, tuple(found), tuple(steps))
