"""Least squares over invertible matrices, where writers move by g and readers by g^-T."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.symmetry.groups import linalg
from symmerge.symmetry.groups.base import Gram

HALVINGS = 12
LEAST = 1e-6  # of the largest eigenvalue: below, a direction is not determined
PULL = 1e-2  # of the mean squared norm of a coordinate
ROUNDING = 1e-14  # relative; below it rounding decides: neither halving nor more steps help


@dataclass(frozen=True)
class _Misfit:
    """|XA - g XB|^2 + |YA - g^-T YB|^2 up to a constant, from Gram matrices alone."""

    write: Gram
    read: Gram

    def __call__(self, g: Tensor) -> Tensor:
        written = _quadratic(g, self.write.needs_right(), self.write.cross)
        return written + _quadratic(linalg.inv(g).mT, self.read.needs_right(), self.read.cross)

    def step(self, g: Tensor) -> Tensor:
        """The Gauss-Newton step z of g <- (1 + z) g.

        The normal equations z P + Q z = R, with P and Q the Gram matrices of the moved factors,
        are a Sylvester equation.
        """
        h = linalg.inv(g).mT
        p, q = g @ self.write.needs_right() @ g.mT, h @ self.read.needs_right() @ h.mT
        return _sylvester(p, q, (self.write.cross @ g.mT - p) - (h @ self.read.cross.mT - q))


def nearest_invertible(
    write: Gram, read: Gram, *, race: int = 5, max_steps: int = 100
) -> Float[Tensor, "*batch n n"]:
    """Minimise the misfit over invertible g by Gauss-Newton steps.

    A step that does not lower the objective is halved, so the objective never increases. No step
    crosses det g = 0, and there may be several minima: four starts (rotation, the same reflected,
    least squares on each side) race for a few steps, then the best continues.
    """
    misfit = _Misfit(write, read)
    g, value = _descend(_starts(write, read), misfit, race)
    best = value.argmin(0)[None, ..., None, None].expand(1, *g.shape[1:])
    return _descend(g.gather(0, best).squeeze(0), misfit, max_steps)[0]


def determined(write: Gram, read: Gram) -> tuple[Gram, Gram]:
    """The same evidence if it determines a matrix; else with a little for the best rotation.

    Where one side has fewer rows than coordinates, the misfit may be lowest at infinity.
    """
    rights = torch.stack([write.needs_right(), read.needs_right()])
    values, _ = linalg.eigh(rights)
    if (values[..., 0] > LEAST * values[..., -1]).all():
        return write, read
    u, _, vh = linalg.svd(write.cross + read.cross)
    weight = PULL * rights.diagonal(dim1=-2, dim2=-1).mean().clamp_min(1e-30)
    pull = Gram(weight * (u @ vh), weight * torch.eye(rights.shape[-1]).to(rights))
    return write + pull, read + pull


def descend_invertible(
    start: Float[Tensor, "*batch n n"], write: Gram, read: Gram, *, steps: int = 200
) -> Float[Tensor, "*batch n n"]:
    """The same by gradient descent, as published: slower, and no better than Gauss-Newton.

    L-BFGS on all heads at once; a head that ends no lower than it started keeps its start. Runs
    on the CPU: for such small matrices, launching GPU kernels takes longer than computing.
    """
    first = start.cpu()
    misfit = _Misfit(*(Gram(gram.cross.cpu(), gram.needs_right().cpu()) for gram in (write, read)))
    with torch.enable_grad():
        g = first.clone(memory_format=torch.contiguous_format).requires_grad_()
        # A history of ten ends as low as the usual hundred, in a third of the time.
        solver = torch.optim.LBFGS(
            [g], max_iter=steps, line_search_fn="strong_wolfe", history_size=10
        )

        def closure() -> float:
            solver.zero_grad()
            value = misfit(g).sum()
            value.backward()
            return value.item()

        solver.step(closure)
    better = misfit(g.detach()) < misfit(first)
    return torch.where(better[..., None, None], g.detach(), first).to(start)


def _descend(
    g: Float[Tensor, "*starts n n"], misfit: _Misfit, max_steps: int
) -> tuple[Tensor, Tensor]:
    """Run Gauss-Newton steps; return the final g and its objective."""
    value = misfit(g)
    for _ in range(max_steps):
        candidate, reached = _line_search(g, value, misfit)
        accept = reached < value
        gain = torch.where(accept, value - reached, 0)
        g = torch.where(accept[..., None, None], candidate, g)
        value = torch.where(accept, reached, value)
        if (gain <= ROUNDING * value.abs()).all():
            break
    return g, value


def _line_search(g: Tensor, value: Tensor, misfit: _Misfit) -> tuple[Tensor, Tensor]:
    """The Gauss-Newton step, halved where it does not lower the objective."""
    step, length = misfit.step(g), torch.ones_like(value)
    candidate, reached = g, value
    for _ in range(HALVINGS):
        candidate = g + length[..., None, None] * step @ g
        invertible = linalg.det(candidate).abs() > 0
        reached = torch.where(invertible, misfit(_identity_if_singular(candidate)), torch.inf)
        worse = ~(reached <= value + ROUNDING * value.abs())
        if not worse.any():
            break
        length = torch.where(worse, length / 2, length)
    return candidate, reached


def _quadratic(g: Tensor, right: Tensor, cross: Tensor) -> Tensor:
    """|A - g B|^2 - |A|^2."""
    return ((g @ right - 2 * cross) * g).sum((-2, -1))


def _identity_if_singular(g: Tensor) -> Tensor:
    """Replace singular matrices, whose objective is discarded, by the identity."""
    singular = linalg.det(g) == 0
    return torch.where(singular[..., None, None], torch.eye(g.shape[-1]).to(g), g)


def _sylvester(p: Tensor, q: Tensor, right: Tensor) -> Tensor:
    """Solve z p + q z = right for symmetric positive definite p and q."""
    (p_values, p_basis), (q_values, q_basis) = linalg.eigh(p), linalg.eigh(q)
    sums = q_values[..., :, None] + p_values[..., None, :]
    floor = 1e-12 * sums.amax((-2, -1), keepdim=True)
    return q_basis @ ((q_basis.mT @ right @ p_basis) / sums.maximum(floor)) @ p_basis.mT


def _starts(write: Gram, read: Gram) -> Float[Tensor, "start *batch n n"]:
    """The best rotation, the same reflected, and least squares for writers and for readers."""
    u, _, vh = linalg.svd(write.cross + read.cross)
    mirror = torch.ones_like(u[..., :1, :])
    mirror[..., -1] = -1  # the other sign of the determinant, where it costs least
    rotation = u @ vh
    writers, readers = (_least_squares(gram, rotation) for gram in (write, read))
    return torch.stack([rotation, (u * mirror) @ vh, writers, linalg.inv(readers).mT])


def _least_squares(gram: Gram, otherwise: Tensor) -> Tensor:
    """The best g for one role alone; `otherwise` where there is none (a head of zeros)."""
    right = gram.needs_right()
    scale = right.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridge = 1e-12 * scale * torch.eye(right.shape[-1]).to(right)
    solution, info = linalg.solve_ex(right + ridge, gram.cross.mT)
    start = torch.where((info == 0)[..., None, None], solution.mT, otherwise)
    values = linalg.svdvals(start)
    usable = (info == 0) & (values[..., -1] > 1e-8 * values[..., 0])
    return torch.where(usable[..., None, None], start, otherwise)
