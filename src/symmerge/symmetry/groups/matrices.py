"""What matrix groups share: layout-preserving products, random rotations, the exponential."""

from __future__ import annotations

from functools import lru_cache
from math import factorial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from symmerge.errors import SymmetryError
from symmerge.symmetry.groups import linalg
from symmerge.symmetry.groups.base import (
    Coordinates,
    Element,
    Group,
    Shape,
    is_transposed,
    normal,
)

# Exact to 1e-12 up to a norm of 8. Products only, so that a CUDA graph can record them.
SQUARINGS = 4
CUBES = 4


class MatrixGroup(Group):
    """A group whose elements are single matrices."""

    def shapes(self) -> dict[str, Shape]:
        return {"matrix": (self.size, self.size)}

    def identity(self, batch: Shape = ()) -> Element:
        return {"matrix": eye(self.size, batch)}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {"matrix": outer["matrix"] @ inner["matrix"]}


def multiply(matrix: Float[Tensor, "*#batch n n"], x: Coordinates) -> Coordinates:
    """matrix @ x in the layout of x."""
    matrix = matrix.to(x)
    if is_transposed(x):
        return (x.mT @ matrix.mT).mT
    return matrix @ x


def constant_gain(group: str, x: Coordinates) -> Coordinates:
    """x if it is constant over the space, else an error: no other gain commutes with matrices."""
    if (x == x[..., :1, :]).all():
        return x
    raise SymmetryError(
        f"pointwise and not constant, but its space is {group}: canonicalize the model first"
    )


def eye(n: int, batch: Shape) -> Float[Tensor, "*batch n n"]:
    """A batch of identity matrices in float64."""
    return torch.eye(n, dtype=torch.float64).expand(*batch, n, n).clone()


def random_rotation(
    n: int, generator: torch.Generator, batch: Shape
) -> Float[Tensor, "*batch n n"]:
    """Uniform over O(n): QR with the signs of R's diagonal moved into Q."""
    q, r = linalg.qr(normal(generator, (*batch, n, n)))
    return (q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]).contiguous()


def exponential(x: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """exp(x) for x of moderate norm, in nine matrix products.

    The series up to x^12, as a polynomial in x^3 whose coefficients are polynomials in x; then
    squared.
    """
    shape, x = x.shape, rearrange(x / 2**SQUARINGS, "... n m -> (...) n m")
    square = x @ x
    cube = square @ x
    one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    powers = torch.stack([one.expand_as(x), x, square, cube]).flatten(1)
    *coefficients, result = (_series(x.dtype, x.device) @ powers).unflatten(1, x.shape).unbind()
    for coefficient in reversed(coefficients):
        result = torch.baddbmm(coefficient, result, cube)
    for _ in range(SQUARINGS):
        result = result @ result
    return result.reshape(shape)


@lru_cache(maxsize=8)
def _series(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "cubes powers"]:
    """Row i: the coefficients of 1, x, x^2 and x^3 that multiply (x^3)^i.

    Cached, because a step recorded as a CUDA graph cannot copy to the GPU.
    """
    rows = [[1 / factorial(3 * row + power) for power in range(3)] + [0.0] for row in range(CUBES)]
    rows[-1][3] = 1 / factorial(3 * CUBES)
    return torch.tensor(rows, dtype=dtype, device=device)
