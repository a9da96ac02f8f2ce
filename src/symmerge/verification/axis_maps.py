"""What a symmetry does to one axis of a tensor, as explicit coefficients in float64.

Written apart from `Group.act`, which computes what is stored, so that a mistake there is seen here:
every new coordinate is listed with the old ones it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor

from symmerge.models.alignment import Alignment
from symmerge.symmetry.groups import (
    Element,
    GeneralLinear,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
    Signs,
)
from symmerge.symmetry.notation import Atom, Product, Role, Sum

BLOCK = 64  # rows of a tensor in float64 at a time


@dataclass(frozen=True)
class AxisMap:
    """New coordinate i is the sum over k of ``factor[i, k]`` times old coordinate ``index[i, k]``.

    A map without `index` is dense: `factor` is its matrix.
    """

    factor: Float[Tensor, "n k"]
    index: Int[Tensor, "n k"] | None = None

    @property
    def terms(self) -> int:
        """How many old coordinates a new one is made of."""
        return self.factor.shape[1]

    @cached_property
    def squared(self) -> AxisMap:
        """The map of variances."""
        return AxisMap(self.factor.square(), self.index)

    @staticmethod
    def identity(n: int) -> AxisMap:
        """The map that changes nothing."""
        return AxisMap(torch.ones(n, 1).double(), torch.arange(n)[:, None])

    def to(self, device: torch.device) -> AxisMap:
        """The same map on a device."""
        if device == self.factor.device:
            return self
        index = None if self.index is None else self.index.to(device)
        return AxisMap(self.factor.to(device), index)

    @cached_property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        if self.index is None or self.index.shape[1] > 1:
            return False
        every = torch.arange(len(self.index), device=self.index.device)
        still = torch.equal(self.index[:, 0], every)
        return still and bool((self.factor == 1).all())

    def apply(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """The columns of x in new coordinates."""
        if self.index is None:
            return (x.mT @ self.factor.mT).mT  # several times faster for few columns
        if x.device.type == "cpu":
            return torch.from_numpy(self._sparse @ x.numpy())
        return self.gathered(x)

    def gathered(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """`apply` of a map with an index, on any device."""
        return (self.factor[:, None] @ x[self.index])[:, 0]

    def rows(self, places: Int[Tensor, " r"], x: Float[Tensor, "n m"]) -> Float[Tensor, "r m"]:
        """Some rows of `apply`, for x in any precision."""
        if self.index is None:
            result = self.factor.new_zeros(len(places), x.shape[1])
            parts = self.factor[places].split(BLOCK, 1)
            for part, rows in zip(parts, x.split(BLOCK), strict=True):
                result.addmm_(part, rows.double())
            return result
        return (self.factor[places][:, None] @ x[self.index[places]].double())[:, 0]

    def transpose(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """The transposed map: what a projection of the new tensor is of the old one."""
        if self.index is None:
            return (x.mT @ self.factor).mT
        if x.device.type == "cpu":
            return torch.from_numpy(self._sparse.T @ x.numpy())
        return self.scattered(x)

    def scattered(self, x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """`transpose` of a map with an index, on any device."""
        assert self.index is not None
        terms = self.factor[:, :, None] * x[:, None]
        return torch.zeros_like(x).index_add_(0, self.index.flatten(), terms.flatten(0, 1))

    @cached_property
    def _sparse(self) -> csr_array:
        assert self.index is not None
        n, k = self.index.shape
        ends = torch.arange(0, n * k + 1, k)
        parts = (part.flatten().numpy() for part in (self.factor, self.index))
        return csr_array((*parts, ends.numpy()), shape=(n, n))


@dataclass(frozen=True)
class _Terms:
    """The same for every index of the space that an element is `per` (one if there is none).

    `spaces` has, for the spaces passed so far, the new index of each coordinate.
    """

    factor: Float[Tensor, "outer n k"]
    index: Int[Tensor, "outer n k"]
    per: str | None
    spaces: Mapping[str, Int[Tensor, " n"]]


def axis_map(alignment: Alignment, axis: Product) -> AxisMap:
    """What an alignment does to one axis of a tensor."""
    terms = _product(alignment, axis)
    assert terms.per is None, f"{terms.per} is on another axis"
    factor, index = terms.factor[0], terms.index[0]
    every = torch.arange(len(index))
    dense = index.shape[1] > 1 and index.shape[1] == len(index) and (index == every).all()
    return AxisMap(factor, None if dense else index)


def _product(alignment: Alignment, product: Product) -> _Terms:
    """Factors side by side, outer first: coordinates multiply."""
    total: _Terms | None = None
    for factor in product.factors:
        terms = _atom(alignment, factor) if isinstance(factor, Atom) else _sum(alignment, factor)
        total = terms if total is None else _inside(total, terms)
    assert total is not None
    return total


def _inside(outer: _Terms, inner: _Terms) -> _Terms:
    """Every coordinate of `outer` holds all of `inner`, with the elements of its own index."""
    if inner.per is not None and inner.per in outer.spaces:
        own = outer.spaces[inner.per]
        factor, index, per = inner.factor[own][None], inner.index[own][None], outer.per
    else:
        # Queries that keep their places are the same in every head; their coordinates are not.
        assert inner.per == outer.per or 1 in (len(inner.factor), len(outer.factor))
        factor, index, per = inner.factor[:, None], inner.index[:, None], outer.per or inner.per
    n = inner.factor.shape[1]
    count = outer.factor.shape[1]
    factors = outer.factor[:, :, None, :, None] * factor[:, :, :, None, :]
    places = outer.index[:, :, None, :, None] * n + index[:, :, :, None, :]
    shape = (len(factors), count * n, -1)
    spaces = {name: places.repeat_interleave(n) for name, places in outer.spaces.items()}
    spaces |= {name: places.repeat(count) for name, places in inner.spaces.items()}
    return _Terms(factors.reshape(shape), places.reshape(shape), per, spaces)


def _sum(alignment: Alignment, fused: Sum) -> _Terms:
    """Blocks one after the other; shorter lists of terms are filled up with zeros."""
    blocks = [_product(alignment, term) for term in fused.terms]
    outer = max(len(block.factor) for block in blocks)
    most = max(block.factor.shape[-1] for block in blocks)
    factors, places, start = [], [], 0
    for block in blocks:
        padding = (0, most - block.factor.shape[-1])
        padded = [torch.nn.functional.pad(x, padding) for x in (block.factor, block.index)]
        factors.append(padded[0].expand(outer, -1, -1))
        places.append((padded[1] + start).expand(outer, -1, -1))
        start += block.factor.shape[1]
    per = next((block.per for block in blocks if block.per), None)
    return _Terms(torch.cat(factors, 1), torch.cat(places, 1), per, {})


def _atom(alignment: Alignment, atom: Atom) -> _Terms:
    space = alignment.spec.spaces[atom.space]
    n = space.group.size
    here = {atom.space: torch.arange(n)}
    if atom.space not in alignment.elements or _stays(space.group, atom.role):
        return _Terms(torch.ones(1, n, 1).double(), torch.arange(n)[None, :, None], None, here)
    element = {part: value.cpu() for part, value in alignment[atom.space].items()}
    if space.per is None:
        element = {part: value[None] for part, value in element.items()}
    factor, index = TERMS[type(space.group)](space.group, element, atom.role)
    return _Terms(factor, index, space.per, here)


def _stays(group: Group, role: Role) -> bool:
    """Gains on a space of matrices are constant, and stay as they are."""
    return role is Role.RIDES and not isinstance(
        group, Permutation | SignedPermutation | ScaledPermutation
    )


Terms = tuple[Float[Tensor, "outer n k"], Int[Tensor, "outer n k"]]


def _permuted(group: Any, element: Element, role: Role) -> Terms:
    index = element["index"][..., None]
    return torch.ones(index.shape).double(), index


def _signed(group: Any, element: Element, role: Role) -> Terms:
    sign, index = element["sign"].double()[..., None], element["index"][..., None]
    return torch.ones_like(sign) if role is Role.RIDES else sign, index


def _signs(group: Any, element: Element, role: Role) -> Terms:
    sign = element["sign"].double()[..., None]  # never of a riding axis: those stay
    return sign, torch.arange(group.size)[:, None].expand_as(sign)


def _scaled(group: Any, element: Element, role: Role) -> Terms:
    scale = element["scale"].double()[..., None]
    by_role = {Role.WRITES: scale, Role.READS: 1 / scale, Role.RIDES: torch.ones_like(scale)}
    return by_role[role], element["index"][..., None]


def _changed_basis(group: Any, element: Element, role: Role) -> Terms:
    matrix = _matrix(element["matrix"].double(), role)
    return matrix, torch.arange(group.size).expand_as(matrix)


def _matrix(matrix: Tensor, role: Role) -> Tensor:
    """The matrix itself for writers; for readers its inverse transpose, by solving."""
    if role is Role.WRITES or not matrix.numel():
        return matrix
    # As large as the matrices: as many heads as each has coordinates would be taken for vectors.
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)
    return torch.linalg.solve(matrix.mT, unit)


def _turned(group: RotaryPairs, element: Element, role: Role) -> Terms:
    """Pairs (a, b) times u = x + iy: (x a - y b, y a + x b); 1 / conj(u) for readers."""
    u = torch.view_as_complex(element["pair"].double().contiguous())
    u = u if role is Role.WRITES else 1 / u.conj()
    matrix = torch.zeros(len(u), group.size, group.size).double()
    pair = torch.arange(group.pairs)
    halves = pair, pair + group.pairs
    a, b = halves if group.layout == "halves" else (2 * pair, 2 * pair + 1)
    matrix[:, a, a], matrix[:, a, b] = u.real, -u.imag
    matrix[:, b, a], matrix[:, b, b] = u.imag, u.real
    rest = slice(group.rotary, None)
    matrix[:, rest, rest] = _matrix(element["rest"].double(), role)
    return matrix, torch.arange(group.size).expand_as(matrix)


TERMS: dict[type[Group], Callable[[Any, Element, Role], Terms]] = {
    Permutation: _permuted,
    SignedPermutation: _signed,
    Signs: _signs,
    ScaledPermutation: _scaled,
    Orthogonal: _changed_basis,
    OrthogonalFixingOnes: _changed_basis,
    GeneralLinear: _changed_basis,
    RotaryPairs: _turned,
}
