"""Parse the notation of the architecture tables: ``(kv q qk) residual*`` -> axes -> pieces.

An axis writes to a space (``s``), reads from it (``s*``) or rides along pointwise (``s~``).
Spaces side by side in parentheses are a product, outer first. ``+`` joins the blocks of a fused
matrix: GPT-2's QKV is ``((h qk) + (h qk*) + (h vo))``. GPT-NeoX's, which interleaves the three
inside every head, is ``(h (qk + qk* + vo))``. A number without axes is ``()``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from itertools import product as cartesian
from math import prod

from torch import Tensor

from symmerge.errors import NotationError


class Role(Enum):
    """How an axis transforms when its space changes basis by g."""

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
    if re.fullmatch(r"\s*\(\s*\)\s*", text):
        return ()
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
            rest = text[position:].strip()
            expected = "a space name, '(', ')' or '+'"
            raise NotationError(f"cannot read '{rest}' in '{text}': expected {expected}")
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


def unparse(axes: Axes) -> str:
    """Axes back in the notation.

    >>> unparse(parse("((h  (qk)) + (h vo*))d~"))
    '((h qk) + (h vo*)) d~'
    """
    return " ".join(_unparse(axis) for axis in axes) or "()"


def _unparse(axis: Product | Sum) -> str:
    if isinstance(axis, Sum):
        return "(" + " + ".join(_unparse(term) for term in axis.terms) + ")"
    factors = [_unparse(f) if isinstance(f, Sum) else str(f) for f in axis.factors]
    return factors[0] if len(factors) == 1 else "(" + " ".join(factors) + ")"


def atoms(axes: Axes) -> Iterator[Atom]:
    """Every atom of a tensor, in order.

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
    """The length of an axis, by the sizes of its spaces.

    >>> size(parse("(h (qk + qk* + vo))")[0], {"h": 4, "qk": 8, "vo": 8})
    96
    """
    if isinstance(axis, Atom):
        return sizes[axis.space]
    if isinstance(axis, Sum):
        return sum(size(term, sizes) for term in axis.terms)
    return prod(size(factor, sizes) for factor in axis.factors)


@dataclass(frozen=True)
class _Unflatten:
    """Split a dimension into factors."""

    dim: int
    sizes: tuple[int, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(self.dim, self.sizes)


@dataclass(frozen=True)
class _Narrow:
    """Keep one block of a dimension."""

    dim: int
    start: int
    length: int

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor without sums: a view with one dimension per atom."""

    tensor: str
    atoms: tuple[Atom, ...]
    steps: tuple[_Unflatten | _Narrow, ...]

    def view(self, tensor: Tensor) -> Tensor:
        """The entries of this piece; shares memory with the tensor."""
        for step in self.steps:
            tensor = step(tensor)
        return tensor

    def positions(self, space: str) -> Iterator[int]:
        """The dimensions of the piece that live in a space."""
        return (position for position, atom in enumerate(self.atoms) if atom.space == space)


def pieces(tensor: str, axes: Axes, sizes: Mapping[str, int]) -> tuple[Piece, ...]:
    """Cut a tensor into pieces without sums; a tensor without sums is one piece.

    >>> sizes = {"h": 2, "qk": 4, "vo": 4, "d": 8}
    >>> cut = pieces("qkv", parse("(h (qk + qk* + vo)) d*"), sizes)
    >>> [" ".join(map(str, piece.atoms)) for piece in cut]
    ['h qk d*', 'h qk* d*', 'h vo d*']
    """
    choices = cartesian(*(_choices(axis, sizes) for axis in axes))
    return tuple(_piece(tensor, choice, sizes) for choice in choices)


@dataclass(frozen=True)
class _Block:
    """One term of a sum, and where it starts along the sum's dimension."""

    start: int
    term: Product


@dataclass(frozen=True)
class _Choice:
    """One term picked from each sum of an axis, and the sizes of the axis's factors."""

    factors: tuple[Atom | _Block, ...]
    sizes: tuple[int, ...]


def _choices(axis: Product, sizes: Mapping[str, int]) -> list[_Choice]:
    """Every way to pick one term from each sum of an axis."""
    factor_sizes = tuple(size(factor, sizes) for factor in axis.factors)
    options = [
        [factor] if isinstance(factor, Atom) else _blocks(factor, sizes) for factor in axis.factors
    ]
    return [_Choice(picked, factor_sizes) for picked in cartesian(*options)]


def _blocks(fused: Sum, sizes: Mapping[str, int]) -> list[_Block]:
    lengths = [size(term, sizes) for term in fused.terms]
    starts = accumulate(lengths, initial=0)
    return [_Block(start, term) for start, term in zip(starts, fused.terms, strict=False)]


def _piece(tensor: str, choices: tuple[_Choice, ...], sizes: Mapping[str, int]) -> Piece:
    picked: list[Atom] = []
    steps: list[_Unflatten | _Narrow] = []
    for choice in choices:
        if len(choice.sizes) > 1:
            steps.append(_Unflatten(len(picked), choice.sizes))
        for factor in choice.factors:
            if isinstance(factor, Atom):
                picked.append(factor)
                continue
            inner = [item for item in factor.term.factors if isinstance(item, Atom)]
            if len(inner) != len(factor.term.factors):
                raise NotationError(f"{tensor}: a sum inside a sum; write it as one sum")
            steps.append(_Narrow(len(picked), factor.start, size(factor.term, sizes)))
            if len(inner) > 1:
                steps.append(_Unflatten(len(picked), tuple(sizes[item.space] for item in inner)))
            picked.extend(inner)
    return Piece(tensor, tuple(picked), tuple(steps))
