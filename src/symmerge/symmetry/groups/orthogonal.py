"""Orthogonal groups of pre-norm streams: O(n), and its subgroup that fixes the ones vector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.symmetry.groups.base import Check, Coordinates, Element, Gram, Shape, Tangent, total
from symmerge.symmetry.groups.matrices import (
    MatrixGroup,
    constant_gain,
    exponential,
    multiply,
    random_rotation,
)
from symmerge.symmetry.groups.polar_factor import polar
from symmerge.symmetry.notation import Role

TOLERANCE = 1e-6  # largest deviation from its group that rounding explains, in float32 or float64
NEWTON_STEPS, CONVERGES = 5, 0.1  # the error squares at every step: five bring 0.1 down to rounding


class RotationGroup(MatrixGroup):
    """A group of orthogonal matrices: the inverse is the transpose, so readers move as writers."""

    def inverse(self, element: Element) -> Element:
        return {"matrix": element["matrix"].mT.contiguous()}

    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        return constant_gain(self.name, x) if role is Role.RIDES else multiply(element["matrix"], x)


@final
@dataclass(frozen=True)
class Orthogonal(RotationGroup):
    """Rotations and reflections: the stream of a pre-RMSNorm model, once the gains are folded."""

    size: int

    @property
    def dimension(self) -> int:
        return self.size * (self.size - 1) // 2

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        return {"matrix": random_rotation(self.size, generator, batch)}

    def check(self, element: Element) -> Check:
        return _is_orthogonal(element["matrix"])

    def tangent(self) -> dict[str, Shape]:
        return {"turn": (self.size, self.size)}

    def retract(self, element: Element, tangent: Tangent) -> Element:
        return {"matrix": _turn(tangent["turn"]) @ element["matrix"]}

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        return {"turn": _skew(write + read)}

    def project(self, element: Element) -> tuple[Element, int]:
        return {"matrix": _orthogonalized(element["matrix"])}, 0

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        return {"matrix": polar(total(write, read))}


@final
@dataclass(frozen=True)
class OrthogonalFixingOnes(RotationGroup):
    """Rotations g with g 1 = 1, which commute with LayerNorm's mean: pre-LayerNorm streams."""

    size: int

    @property
    def dimension(self) -> int:
        return (self.size - 1) * (self.size - 2) // 2

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        basis = ones_complement(self.size)
        return {"matrix": self._extended(random_rotation(self.size - 1, generator, batch), basis)}

    def check(self, element: Element) -> Check:
        error = (element["matrix"].sum(-1) - 1).abs().amax().item()
        if error > TOLERANCE:
            return Check(False, f"moves the ones vector by {error:.1e}")
        return _is_orthogonal(element["matrix"])

    def tangent(self) -> dict[str, Shape]:
        return {"turn": (self.size - 1, self.size - 1)}

    def retract(self, element: Element, tangent: Tangent) -> Element:
        basis = ones_complement(self.size, tangent["turn"].device).to(tangent["turn"].dtype)
        return {"matrix": self._extended(_turn(tangent["turn"]), basis) @ element["matrix"]}

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        basis = ones_complement(self.size, write.device).to(write.dtype)
        return {"turn": _skew(basis.mT @ (write + read) @ basis)}

    def project(self, element: Element) -> tuple[Element, int]:
        basis = ones_complement(self.size).to(element["matrix"])
        inner = _orthogonalized(basis.mT @ element["matrix"] @ basis)
        return {"matrix": self._extended(inner, basis)}, 0

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        # In the complement of the ones vector: exact, unlike a penalty on moving that vector.
        basis = ones_complement(self.size).to(write.cross)
        inner = polar(basis.mT @ total(write, read) @ basis)
        return {"matrix": self._extended(inner, basis.to(inner))}

    def _extended(self, inner: Tensor, basis: Tensor) -> Tensor:
        """A rotation of the complement of the ones vector, extended to the whole space."""
        return basis @ inner @ basis.mT + 1 / self.size


@lru_cache(maxsize=8)
def ones_complement(n: int, device: torch.device | None = None) -> Float[Tensor, "n k"]:
    """An orthonormal basis of the vectors with sum zero, from a Householder reflection."""
    v = torch.full((n,), n**-0.5, dtype=torch.float64)
    v[0] -= 1
    norm = v.norm()
    if norm == 0:  # n == 1
        return torch.zeros(1, 0, dtype=torch.float64, device=device)
    v = v / norm
    return (torch.eye(n, dtype=torch.float64) - 2 * torch.outer(v, v))[:, 1:].to(device)


def _turn(direction: Tensor) -> Tensor:
    """A rotation: the exponential of the skew part."""
    return exponential(direction - direction.mT)


def _skew(gradient: Tensor) -> Tensor:
    """Gradient with respect to T of a loss that depends only on T - T'."""
    return gradient - gradient.mT


def _orthogonalized(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix to a nearly orthogonal one: Newton steps, no SVD."""
    matrix = matrix.double()
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(NEWTON_STEPS):
        error = unit - matrix.mT @ matrix
        if not error.abs().max() < CONVERGES:
            return polar(matrix)
        matrix = matrix + 0.5 * matrix @ error
    return matrix


def _is_orthogonal(matrix: Tensor) -> Check:
    if not matrix.numel():
        return Check(True)
    error = (matrix @ matrix.mT - torch.eye(matrix.shape[-1]).to(matrix)).abs().amax().item()
    if error <= TOLERANCE:
        return Check(True)
    return Check(False, f"not orthogonal: |g g' - 1| reaches {error:.1e}")
