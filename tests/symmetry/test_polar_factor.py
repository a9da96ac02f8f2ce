"""The polar factor without a decomposition, as a GPU computes it."""

import pytest
import torch

from symmerge.symmetry.groups.polar_factor import newton, nuclear_norm, polar

pytestmark = pytest.mark.quick
GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("shape", [(1, 1), (6, 8, 8), (63, 63)])
@pytest.mark.parametrize("spread", [0, -9])  # the smallest singular values, as powers of ten
def test_newton_finds_the_polar_factor(shape, spread):
    scales = torch.logspace(0, spread, shape[-1], dtype=torch.float64)
    matrix = torch.randn(shape, generator=GENERATOR, dtype=torch.float64) * scales
    found = newton(matrix)
    assert found is not None
    assert (found - polar(matrix)).abs().max() < 1e-10
    # control: the matrix itself, scaled to the same length, is not orthogonal
    apart = found @ matrix.mT - (found @ matrix.mT).mT
    assert apart.abs().max() < 1e-10 * matrix.abs().max()


def test_newton_refuses_what_has_no_unique_factor():
    matrix = torch.randn(3, 5, 5, generator=GENERATOR, dtype=torch.float64)
    matrix[1, :, 0] = 0
    assert newton(matrix) is None
    assert newton(torch.full((4, 4), torch.nan, dtype=torch.float64)) is None


def test_nuclear_norm_is_what_the_polar_factor_gains():
    matrix = torch.randn(3, 7, 7, generator=GENERATOR, dtype=torch.float64)
    gains = (polar(matrix) * matrix).sum((-2, -1))
    assert torch.allclose(nuclear_norm(matrix), gains, atol=1e-12)
    assert (nuclear_norm(matrix) > matrix.diagonal(dim1=-2, dim2=-1).sum(-1)).all()
