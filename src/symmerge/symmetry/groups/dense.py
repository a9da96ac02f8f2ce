"""Matrix groups: rotations, rotations that fix the ones vector, and every invertible matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import factorial
from typing import final

import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.errors import SymmetryError
from symmerge.symmetry.groups import linalg
from symmerge.symmetry.groups.base import (
    Check,
    Element,
    Gram,
    Group,
    is_transposed,
    normal,
    total,
    uniform,
)
from symmerge.symmetry.notation import Role

TOLERANCE = 1e-6  # how far rounding may leave a float64 (or float32) matrix from its group
NEARLY, STRAIGHTENINGS = 0.1, 5  # errors square at every step: 0.1 is rounding after five


def multiply(
    matrix: Float[Tensor, "*#batch n n"], x: Float[Tensor, "*batch n m"]
) -> Float[Tensor, "*batch n m"]:
    """matrix @ x in the layout of x."""
    matrix = matrix.to(x)
    if is_transposed(x):
        return (x.mT @ matrix.mT).mT
    return matrix @ x


def ride(group: str, x: Tensor) -> Tensor:
    """A constant gain commutes with every matrix; any other gain does not."""
    if (x == x[..., :1, :]).all():
        return x
    raise SymmetryError(
        f"pointwise, and not constant, but its space is {group}: canonicalize the model first (it folds the gains)"
    )


def _eye(n: int, batch: tuple[int, ...]) -> Tensor:
    return torch.eye(n, dtype=torch.float64).expand(*batch, n, n).clone()


def _rotation(n: int, generator: torch.Generator, batch: tuple[int, ...]) -> Tensor:
    q, r = linalg.qr(normal(generator, (*batch, n, n)))
    return (
        q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    ).contiguous()  # the sign makes it uniform over O(n)


SQUARINGS, CUBES = (
    4,
    4,
)  # of the exponential: exact to 1e-12 up to a norm of 8, by products alone, so that a GPU can record it
MOST_CONDITION = (
    1e4  # of a basis inside a head that is learned: beyond, float32 weights lose too much
)


def exponential(x: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """exp(x) for x that is not large: the series up to x^12, as a polynomial in x^3 whose coefficients are polynomials in x, then squared. Nine products in all."""
    shape, x = x.shape, (x / 2**SQUARINGS)[None].flatten(0, -3)
    square = x @ x
    cube = square @ x
    one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    parts = _series(x.dtype, x.device) @ torch.stack([one.expand_as(x), x, square, cube]).flatten(1)
    *others, found = parts.unflatten(1, x.shape).unbind()
    for other in reversed(others):
        found = torch.baddbmm(other, found, cube)
    for _ in range(SQUARINGS):
        found = found @ found
    return found.reshape(shape)


@lru_cache(maxsize=8)
def _series(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "cubes powers"]:
    """In row i: what 1, x, x^2 and x^3 are multiplied by before they are multiplied by x^3 i times. Kept: a recorded step cannot copy to the GPU."""
    rows = [[1 / factorial(3 * row + power) for power in range(3)] + [0.0] for row in range(CUBES)]
    rows[-1][3] = 1 / factorial(3 * CUBES)
    return torch.tensor(rows, dtype=dtype, device=device)


def _turn(direction: Tensor) -> Tensor:
    """A rotation: the exponential of the skew part."""
    return exponential(direction - direction.mT)


def _skew(slope: Tensor) -> Tensor:
    """The gradient by T of what depends on T - T'."""
    return slope - slope.mT


def _polar(cross: Tensor) -> Tensor:
    try:
        u, _, vh = linalg.svd(cross.double())
    except RuntimeError:  # CUDA's solvers give up on rank-deficient evidence, and LAPACK's fast one now and then where all values are alike
        u, _, vh = (
            torch.from_numpy(part)
            for part in scipy.linalg.svd(cross.double().cpu().numpy(), lapack_driver="gesvd")
        )
    return (u @ vh).to(cross.device)


def _straightened(matrix: Tensor) -> Tensor:
    """The nearest rotation to what is one but for rounding: Newton's steps, no decomposition."""
    matrix = matrix.double()
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(STRAIGHTENINGS):
        error = unit - matrix.mT @ matrix
        if not error.abs().max() < NEARLY:
            return _polar(matrix)
        matrix = matrix + 0.5 * matrix @ error
    return matrix


def _is_orthogonal(matrix: Tensor) -> Check:
    error = (
        (matrix @ matrix.mT - torch.eye(matrix.shape[-1]).to(matrix)).abs().amax().item()
        if matrix.numel()
        else 0.0
    )
    return Check(
        error <= TOLERANCE,
        "" if error <= TOLERANCE else f"not orthogonal: |g g' - 1| reaches {error:.1e}",
    )


@final
@dataclass(frozen=True)
class Orthogonal(Group):
    """Rotations and reflections: the stream of a pre-RMSNorm model, once the gains are folded."""

    size: int

    @property
    def dimension(self) -> int:
        return self.size * (self.size - 1) // 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"matrix": (self.size, self.size)}

    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        return {"matrix": _eye(self.size, batch)}

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        return {"matrix": _rotation(self.size, generator, batch)}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {"matrix": outer["matrix"] @ inner["matrix"]}

    def inverse(self, element: Element) -> Element:
        return {"matrix": element["matrix"].mT.contiguous()}

    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        return ride(self.name, x) if role is Role.RIDES else multiply(element["matrix"], x)

    def check(self, element: Element) -> Check:
        return _is_orthogonal(element["matrix"])

    def tangent(self) -> dict[str, tuple[int, ...]]:
        return {"turn": (self.size, self.size)}

    def retract(self, element: Element, along: Mapping[str, Tensor]) -> Element:
        return {"matrix": _turn(along["turn"]) @ element["matrix"]}

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        return {"turn": _skew(write + read)}

    def project(self, element: Element) -> tuple[Element, int]:
        return {"matrix": _straightened(element["matrix"])}, 0

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        return {"matrix": _polar(total(write, read))}


@final
@dataclass(frozen=True)
class OrthogonalFixingOnes(Group):
    """Rotations g with g 1 = 1, which commute with LayerNorm's mean: the stream of a pre-LayerNorm model."""

    size: int

    @property
    def dimension(self) -> int:
        return (self.size - 1) * (self.size - 2) // 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"matrix": (self.size, self.size)}

    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        return {"matrix": _eye(self.size, batch)}

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        basis = ones_complement(self.size)
        inner = _rotation(self.size - 1, generator, batch)
        return {"matrix": basis @ inner @ basis.mT + 1 / self.size}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {"matrix": outer["matrix"] @ inner["matrix"]}

    def inverse(self, element: Element) -> Element:
        return {"matrix": element["matrix"].mT.contiguous()}

    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        return ride(self.name, x) if role is Role.RIDES else multiply(element["matrix"], x)

    def check(self, element: Element) -> Check:
        moved = (element["matrix"].sum(-1) - 1).abs().amax().item()
        if moved > TOLERANCE:
            return Check(False, f"moves the ones vector by {moved:.1e}")
        return _is_orthogonal(element["matrix"])

    def tangent(self) -> dict[str, tuple[int, ...]]:
        return {"turn": (self.size - 1, self.size - 1)}

    def retract(self, element: Element, along: Mapping[str, Tensor]) -> Element:
        basis = ones_complement(self.size, along["turn"].device).to(along["turn"].dtype)
        return {
            "matrix": (basis @ _turn(along["turn"]) @ basis.mT + 1 / self.size) @ element["matrix"]
        }

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        basis = ones_complement(self.size, write.device).to(write.dtype)
        return {"turn": _skew(basis.mT @ (write + read) @ basis)}

    def project(self, element: Element) -> tuple[Element, int]:
        basis = ones_complement(self.size).to(element["matrix"])
        return {
            "matrix": basis @ _straightened(basis.mT @ element["matrix"] @ basis) @ basis.mT
            + 1 / self.size
        }, 0

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        # Solve in the complement of the ones vector: exact, where adding a multiple of 1 1' only tends to it.
        basis = ones_complement(self.size).to(write.cross)
        inner = _polar(basis.mT @ total(write, read) @ basis)
        basis = basis.to(inner)
        return {"matrix": basis @ inner @ basis.mT + 1 / self.size}


@lru_cache(maxsize=8)
def ones_complement(n: int, device: torch.device | None = None) -> Float[Tensor, "n k"]:
    """An orthonormal basis of the vectors whose sum is zero: the last n - 1 columns of a Householder reflection."""
    v = torch.full((n,), n**-0.5, dtype=torch.float64)
    v[0] -= 1
    norm = v.norm()
    if norm == 0:  # n == 1
        return torch.zeros(1, 0, dtype=torch.float64, device=device)
    v = v / norm
    return (torch.eye(n, dtype=torch.float64) - 2 * torch.outer(v, v))[:, 1:].to(device)


@final
@dataclass(frozen=True)
class GeneralLinear(Group):
    """Every invertible matrix: inside a head, where only the products of writers and readers matter."""

    size: int

    @property
    def dimension(self) -> int:
        return self.size**2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"matrix": (self.size, self.size)}

    def identity(self, batch: tuple[int, ...] = ()) -> Element:
        return {"matrix": _eye(self.size, batch)}

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Element:
        left, right = (_rotation(self.size, generator, batch) for _ in range(2))
        stretch = uniform(
            generator, (*batch, self.size), -0.5, 0.5
        ).exp()  # condition number at most e
        return {"matrix": (left * stretch[..., None, :]) @ right}

    def compose(self, outer: Element, inner: Element) -> Element:
        return {"matrix": outer["matrix"] @ inner["matrix"]}

    def inverse(self, element: Element) -> Element:
        return {"matrix": linalg.inv(element["matrix"])}

    def act(
        self, element: Element, x: Float[Tensor, "*batch n m"], role: Role
    ) -> Float[Tensor, "*batch n m"]:
        if role is Role.RIDES:
            return ride(self.name, x)
        return multiply(element["matrix"] if role is Role.WRITES else _dual(element), x)

    def check(self, element: Element) -> Check:
        if not element["matrix"].isfinite().all():
            return Check(False, "not finite")
        values = linalg.svdvals(element["matrix"].double())
        if not values.numel():
            return Check(True)
        condition = (values[..., 0] / values[..., -1]).max().item()
        ok = condition < 1e8  # beyond, float64 products lose more than float32 stores
        return Check(ok, "" if ok else f"nearly singular: condition number {condition:.1e}")

    def tangent(self) -> dict[str, tuple[int, ...]]:
        return {"change": (self.size, self.size)}

    def start(self, batch: tuple[int, ...] = ()) -> Element:
        return {"matrix": _eye(self.size, batch), "dual": _eye(self.size, batch)}

    def retract(self, element: Element, along: Mapping[str, Tensor]) -> Element:
        change = along["change"]
        if "dual" not in element:
            return {"matrix": exponential(change) @ element["matrix"]}
        step, dual = exponential(torch.stack([change, -change.mT])).unbind()
        return {"matrix": step @ element["matrix"], "dual": dual @ element["dual"]}

    def tangent_gradient(self, write: Tensor, read: Tensor) -> dict[str, Tensor]:
        return {"change": write - read.mT}

    def project(self, element: Element) -> tuple[Element, int]:
        """Singular values that are too small against the largest are raised."""
        if not self.size:
            return element, 0
        u, values, vh = linalg.svd(element["matrix"].double())
        least = values[..., :1] / MOST_CONDITION
        bad = (values < (1 - 1e-6) * least).any(
            -1
        )  # what was mended before is good, though rounding may say otherwise
        raised = (u * values.maximum(least)[..., None, :]) @ vh
        return {"matrix": torch.where(bad[..., None, None], raised, element["matrix"])}, int(
            bad.sum()
        )

    def nearest(self, write: Gram, read: Gram | None = None, ride: Gram | None = None) -> Element:
        if not self.size:
            return self.identity(tuple(write.cross.shape[:-2]))
        if read is None:
            return {"matrix": linalg.solve(write.needs_right().mT, write.cross.mT).mT}
        return {"matrix": nearest_invertible(write, read)}


def _dual(element: Element) -> Tensor:
    """The inverse transpose: given where an element moves step by step and inverting it each time would take longer than the step."""
    return element["dual"] if "dual" in element else linalg.inv(element["matrix"]).mT


def nearest_invertible(
    write: Gram, read: Gram, *, race: int = 5, max_steps: int = 100
) -> Float[Tensor, "*batch n n"]:
    """Minimise |XA - g XB|^2 + |YA - g^-T YB|^2 over invertible g, from the Gram matrices alone.

    Gauss-Newton on g <- (1 + z) g. The normal equations z P + Q z = R, with P and Q the Gram matrices of the moved
    factors, are a Sylvester equation that two symmetric eigendecompositions solve. A step that does not lower the
    objective is halved, so the objective never increases. No step crosses det g = 0 and there may be several minima:
    four starts (rotation, the same reflected, least squares on each side) race for a few steps, the best goes on.
    """
    g, value = _descend(_starts(write, read), write, read, race)
    best = value.argmin(0)[None, ..., None, None].expand(1, *g.shape[1:])
    return _descend(g.gather(0, best).squeeze(0), write, read, max_steps)[0]


def descend_invertible(
    start: Float[Tensor, "*batch n n"], write: Gram, read: Gram, *, steps: int = 200
) -> Float[Tensor, "*batch n n"]:
    """The same minimum by gradient descent from a start, as published methods do it: slower, and no better than Gauss-Newton.

    Quasi-Newton steps on all heads at once; what ends no lower than it started is dropped. On a CPU: a GPU takes longer to be asked for numbers this
    small than to find them.
    """
    first, p, q, written, been_read = (
        given.cpu()
        for given in (start, write.needs_right(), read.needs_right(), write.cross, read.cross)
    )

    def objective(g: Tensor) -> Tensor:
        return _quadratic(g, p, written) + _quadratic(linalg.inv(g).mT, q, been_read)

    with torch.enable_grad():
        g = first.clone(memory_format=torch.contiguous_format).requires_grad_()
        # A short memory ends as low as the usual hundred steps, in a third of the time.
        solver = torch.optim.LBFGS(
            [g], max_iter=steps, line_search_fn="strong_wolfe", history_size=10
        )

        def closure() -> float:
            solver.zero_grad()
            value = objective(g).sum()
            value.backward()
            return value.item()

        solver.step(closure)
    better = objective(g.detach()) < objective(first)
    return torch.where(better[..., None, None], g.detach(), first).to(start)


def _descend(
    g: Float[Tensor, "*starts n n"], write: Gram, read: Gram, max_steps: int
) -> tuple[Tensor, Tensor]:
    p, q = write.needs_right(), read.needs_right()

    def objective(g: Tensor) -> Tensor:
        h = linalg.inv(g).mT
        return _quadratic(g, p, write.cross) + _quadratic(h, q, read.cross)

    value = objective(g)
    for _ in range(max_steps):
        h = linalg.inv(g).mT
        moved_p, moved_q = g @ p @ g.mT, h @ q @ h.mT
        step = _sylvester(
            moved_p, moved_q, (write.cross @ g.mT - moved_p) - (h @ read.cross.mT - moved_q)
        )
        size = torch.ones_like(value)
        candidate, reached = g, value
        for _ in range(12):
            candidate = g + size[..., None, None] * step @ g
            reached = torch.where(
                linalg.det(candidate).abs() > 0, objective(_solvable(candidate)), torch.inf
            )
            worse = ~(
                reached <= value + 1e-14 * value.abs()
            )  # where rounding decides, halving does not help
            if not worse.any():
                break
            size = torch.where(worse, size / 2, size)
        accept = reached < value
        gain = torch.where(accept, value - reached, 0)
        g = torch.where(accept[..., None, None], candidate, g)
        value = torch.where(accept, reached, value)
        if (gain <= 1e-14 * value.abs()).all():
            break
    return g, value


def _quadratic(g: Tensor, right: Tensor, cross: Tensor) -> Tensor:
    """|A - g B|^2 less |A|^2."""
    return ((g @ right - 2 * cross) * g).sum((-2, -1))


def _solvable(g: Tensor) -> Tensor:
    """The identity in place of matrices that have no inverse; their objective is discarded."""
    singular = linalg.det(g) == 0
    return torch.where(singular[..., None, None], torch.eye(g.shape[-1]).to(g), g)


def _sylvester(p: Tensor, q: Tensor, right: Tensor) -> Tensor:
    """Solve z p + q z = right for symmetric positive p and q."""
    (p_values, p_basis), (q_values, q_basis) = linalg.eigh(p), linalg.eigh(q)
    sums = q_values[..., :, None] + p_values[..., None, :]
    floor = 1e-12 * sums.amax((-2, -1), keepdim=True)
    return q_basis @ ((q_basis.mT @ right @ p_basis) / sums.maximum(floor)) @ p_basis.mT


def _starts(write: Gram, read: Gram) -> Float[Tensor, "start *batch n n"]:
    u, _, vh = linalg.svd(write.cross + read.cross)
    mirror = torch.ones_like(u[..., :1, :])
    mirror[..., -1] = -1  # the other sign of the determinant, where it costs least
    starts = [u @ vh, (u * mirror) @ vh]
    for gram, transpose in ((write, False), (read, True)):
        right = gram.needs_right()
        ridge = (
            1e-12
            * right.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            * torch.eye(right.shape[-1]).to(right)
        )
        solved, info = linalg.solve_ex(right + ridge, gram.cross.mT)
        start = torch.where(
            (info == 0)[..., None, None], solved.mT, starts[0]
        )  # a head of zeros has no solution, and its values no meaning
        values = linalg.svdvals(start)
        usable = (info == 0) & (values[..., -1] > 1e-8 * values[..., 0])
        start = torch.where(usable[..., None, None], start, starts[0])
        starts.append(linalg.inv(start).mT if transpose else start)
    return torch.stack(starts)
