"""The general linear group: bases inside a head, where only writer-reader products matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from symmerge.symmetry.groups import linalg
from symmerge.symmetry.groups.base import (
    Check,
    Coordinates,
    Element,
    Gram,
    Shape,
    Tangent,
    uniform,
)
from symmerge.symmetry.groups.invertible import nearest_invertible
from symmerge.symmetry.groups.matrices import (
    MatrixGroup,
    constant_gain,
    exponential,
    eye,
    multiply,
    random_rotation,
)
from symmerge.symmetry.notation import Role

MAX_CONDITION = 1e4  # of a learned basis in a head: above it, float32 weights lose too many digits
SINGULAR = 1e8  # condition number above which float64 products lose more digits than float32 stores


@final
@dataclass(frozen=True)
class GeneralLinear(MatrixGroup):
    """Every invertible matrix. Elements may cache their inverse transpose as `dual`."""

    size: int

    @property
    def dimension(self) -> int:
        return self.size**2

    def random(self, generator: torch.Generator, batch: Shape = ()) -> Element:
        left, right = (random_rotation(self.size, generator, batch) for _ in range(2))
        # condition number at most e
        stretch = uniform(generator, (*batch, self.size), -0.5, 0.5).exp()
        return {"matrix": (left * stretch[..., None, :]) @ right}

    def inverse(self, element: Element) -> Element:
        return {"matrix": linalg.inv(element["matrix"])}

    def act(self, element: Element, x: Coordinates, role: Role) -> Coordinates:
        if role is Role.RIDES:
            return constant_gain(self.name, x)
        return multiply(element["matrix"] if role is Role.WRITES else _dual(element), x)

    def check(self, element: Element) -> Check:
        if not element["matrix"].isfinite().all():
            return Check(False, "not finite")
        values = linalg.svdvals(element["matrix"].double())
        if not values.numel():
            return Check(True)
        condition = (values[..., 0] / values[..., -1]).max().item()
        if condition < SINGULAR:
            return Check(True)
        return Check(False, f"nearly singular: condition number {condition:.1e}")

    def tangent(self) -> dict[str, Shape]:
        return {"change": (self.size, self.size)}

    def start(self, batch: Shape = ()) -> Element:
        return {"matrix": eye(self.size, batch), "dual": eye(self.size, batch)}

    def retract(self, element: Element, tangent: Tangent) -> Element:
        change = tangent["change"]
        if "dual" not in element:
            return {"matrix": exponential(change) @ element["matrix"]}
        step, dual = exponential(torch.stack([change, -change.mT])).unbind()
        return {"matrix": step @ element["matrix"], "dual": dual @ element["dual"]}

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        return {"change": write - read.mT}

    def project(self, element: Element) -> tuple[Element, int]:
        """Raise singular values that are too small relative to the largest."""
        if not self.size:
            return element, 0
        u, values, vh = linalg.svd(element["matrix"].double())
        least = values[..., :1] / MAX_CONDITION
        # The margin spares values that an earlier projection raised: they differ only by rounding.
        bad = (values < (1 - 1e-6) * least).any(-1)
        raised = (u * values.maximum(least)[..., None, :]) @ vh
        matrix = torch.where(bad[..., None, None], raised, element["matrix"])
        return {"matrix": matrix}, int(bad.sum())

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        if not self.size:
            return self.identity(tuple(write.cross.shape[:-2]))
        if read is None:
            return {"matrix": linalg.solve(write.needs_right().mT, write.cross.mT).mT}
        return {"matrix": nearest_invertible(write, read)}


def _dual(element: Element) -> Tensor:
    """The inverse transpose; the learner caches it, since inverting costs more than its step."""
    return element["dual"] if "dual" in element else linalg.inv(element["matrix"]).mT
