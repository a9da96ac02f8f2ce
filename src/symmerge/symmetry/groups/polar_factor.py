"""The polar factor of a matrix: the orthogonal matrix nearest to it."""

from __future__ import annotations

import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.symmetry.groups import linalg

STEPS = 30  # of Newton's iteration; ten are enough unless the matrix is nearly singular
PRECISE = 1e-12  # largest deviation from orthogonality per row at which it has converged


def polar(cross: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """U V' of the singular value decomposition U S V', in float64.

    A GPU has no fast decomposition of many small matrices (it takes them one after the other), so
    there Newton's iteration finds the same matrix by products and inverses, if it is unique.
    """
    cross = cross.double()
    if cross.is_cuda and (factor := newton(cross)) is not None:
        return factor
    try:
        u, _, vh = linalg.svd(cross)
    except RuntimeError:
        # CUDA fails on rank-deficient input, LAPACK's fast driver where all values are equal.
        matrix = cross.cpu().numpy()
        u, _, vh = map(torch.from_numpy, scipy.linalg.svd(matrix, lapack_driver="gesvd"))
    return (u @ vh).to(cross.device)


def newton(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"] | None:
    """The polar factor by Higham's scaled Newton iteration; None if it does not converge.

    >>> newton(torch.tensor([[0.0, -3.0], [2.0, 0.0]], dtype=torch.float64))
    tensor([[ 0., -1.],
            [ 1.,  0.]], dtype=torch.float64)
    """
    unit = torch.eye(matrix.shape[-1]).to(matrix)
    for _ in range(STEPS):
        inverse, singular = torch.linalg.inv_ex(matrix)
        if bool(singular.any()):
            return None
        scale = _sizes(inverse) / _sizes(matrix)
        matrix = (scale * matrix + inverse.mT / scale) / 2
        error = (matrix.mT @ matrix - unit).abs().amax()
        if error <= PRECISE * len(unit):  # never, if a number is not finite
            return matrix
    return None


def _sizes(matrix: Tensor) -> Tensor:
    """The fourth root of the largest column sum times the largest row sum."""
    absolute = matrix.abs()
    product = absolute.sum(-2).amax(-1) * absolute.sum(-1).amax(-1)
    return product[..., None, None] ** 0.25


def nuclear_norm(cross: Float[Tensor, "*batch n n"]) -> Float[Tensor, " *batch"]:
    """The sum of singular values: what the nearest orthogonal matrix gains."""
    if cross.is_cuda:
        return (polar(cross) * cross).sum((-2, -1))
    return linalg.svdvals(cross).sum(-1)
