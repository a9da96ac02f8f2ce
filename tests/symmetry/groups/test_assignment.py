"""Assignments against scipy's dense solver and brute force; the proof against wrong prices."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from symmerge.errors import SymmetryError
from symmerge.symmetry.groups import assignment
from symmerge.symmetry.groups.assignment import gap_at, solve_assignments
from symmerge.symmetry.groups.indices import DENSE, assign


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_dead_units(n: int) -> Tensor:
    score = normal(n, 20) @ normal(20, n, seed=1)
    score[: n // 3], score[:, ::3] = 0, 0
    return score


def of_uneven_norms(n: int) -> Tensor:
    """Large units want each other's partners: prices from means are far off."""
    return normal(n, n) * normal(n, 1, seed=1).exp() * normal(1, n, seed=2).exp()


def planted(n: int) -> Tensor:
    units = normal(n, 40)
    return units @ (units.flip(0) + 2 * normal(n, 40, seed=1)).T


INSTANCES: dict[str, Callable[[int], Tensor]] = {
    "noise": lambda n: normal(n, n),
    "negative": lambda n: -10 - normal(n, n).abs(),
    "low rank": lambda n: normal(n, 8) @ normal(8, n, seed=1),
    "a product": lambda n: normal(n, 1) @ normal(1, n, seed=1),
    "planted": planted,
    "integers": lambda n: normal(n, n).round(),
    "duplicates": lambda n: normal(-(-n // 3), -(-n // 3)).repeat(3, 3)[:n, :n],
    "all equal": lambda n: torch.ones(n, n, dtype=torch.float64),
    "zeros": lambda n: torch.zeros(n, n, dtype=torch.float64),
    "dead units": with_dead_units,
    "uneven norms": of_uneven_norms,
    "far from zero": lambda n: normal(n, n) + 1e6,
    "huge": lambda n: normal(n, n) * 1e300,
    "tiny": lambda n: normal(n, n) * 1e-300,
    "float32": lambda n: normal(n, n).float(),
}


def value(score: Tensor, index: Tensor) -> Tensor:
    return score.gather(-1, index[..., None]).double().sum((-2, -1))


def optimum(score: Tensor) -> Tensor:
    unit = score.abs().max().double().clamp_min(1e-308)
    index = linear_sum_assignment((score.double() / unit).numpy(), maximize=True)[1]
    return value(score, torch.as_tensor(index))


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 301])
@pytest.mark.parametrize("name", INSTANCES)
def test_the_value_is_that_of_scipy_and_proved(name: str, n: int) -> None:
    score = INSTANCES[name](n)
    found = solve_assignments(score)
    assert torch.equal(found.index.sort().values, torch.arange(n))
    scale = score.abs().max().double()
    assert abs(value(score, found.index) - optimum(score)) <= n * 1e-12 * scale
    assert found.exact
    for gap in (found.gap, gap_at(score, found.index, found.prices)):
        assert -n * 1e-14 * scale <= gap <= n * 1.1e-11 * scale


@given(st.integers(1, 6), st.integers(0, 2**31), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_small_ones_by_brute_force(n: int, seed: int, digits: int) -> None:
    score = (normal(n, n, seed=seed) * digits).round()
    found = solve_assignments(score)
    rows = range(n)
    best = max(sum(score[i, p[i]].item() for i in rows) for p in permutations(rows))
    assert value(score, found.index).item() == best
    assert found.exact


@pytest.mark.parametrize("n", [DENSE - 1, DENSE + 1])
def test_a_unique_optimum_is_the_permutation_of_scipy(n: int) -> None:
    score = normal(n, 50) @ normal(50, n, seed=1)
    expected = torch.as_tensor(linear_sum_assignment(score.numpy(), maximize=True)[1])
    assert torch.equal(assign(score), expected)


def test_batches_keep_their_shape_and_order() -> None:
    score = normal(2, 3, 40, 40)
    found = solve_assignments(score)
    assert found.index.shape == found.prices.shape == (2, 3, 40)
    assert found.gap.shape == found.exact.shape == (2, 3)
    assert torch.equal(found.index, assign(score))
    assert torch.equal(found.index[1, 2], solve_assignments(score[1, 2]).index)


def test_prices_of_a_similar_problem_change_the_way_and_not_the_result() -> None:
    score = of_uneven_norms(300)
    before = solve_assignments(score)
    similar = score + 0.01 * normal(300, 300, seed=5)
    warm = solve_assignments(similar, before.prices)
    assert torch.equal(warm.index, solve_assignments(similar).index)
    wrong = solve_assignments(similar, 100 * normal(300, seed=6))
    assert torch.equal(wrong.index, warm.index)
    assert warm.exact and wrong.exact


def test_the_gap_sees_a_worse_permutation_and_wrong_prices() -> None:
    score = normal(200, 200)
    found = solve_assignments(score)
    assert gap_at(score, found.index, found.prices) < 1e-9
    swapped = found.index.clone()
    swapped[[0, 1]] = found.index[[1, 0]]
    loss = (value(score, found.index) - value(score, swapped)).item()
    assert gap_at(score, swapped, found.prices) == pytest.approx(loss, abs=1e-9)
    assert loss > 0.1
    assert gap_at(score, found.index, found.prices + normal(200, seed=1)) > 1


def test_without_a_proof_it_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense solver steps in: the right permutation, with a gap that says what is proved."""
    score = of_uneven_norms(200)
    monkeypatch.setattr(assignment, "ROUNDS", 1)
    found = solve_assignments(score)
    assert not found.exact and found.gap > 1e-3
    assert value(score, found.index) == pytest.approx(optimum(score).item())
    monkeypatch.undo()
    assert solve_assignments(score).exact


def test_a_chain_of_candidates_takes_no_exponential_time() -> None:
    """0.7 s; without the known permutation first in each row scipy was stopped after 40 s."""
    score = normal(1000, 1, seed=13) @ normal(1, 1000, seed=3)
    assert solve_assignments(score).exact


def test_ties_do_not_multiply_candidates() -> None:
    score, prices = torch.ones(600, 600), torch.zeros(600, dtype=torch.float64)
    for largest, many in ((1.0, False), (0.0, True)):  # without jitter all entries are candidates
        jitter = assignment._jitter(600, largest, score.device)
        _, keys, _ = assignment._first_candidates(score, prices, jitter)
        assert (len(keys) > 100 * 600) == many


@pytest.mark.parametrize("n", [5, DENSE + 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_refused(n: int, bad: float) -> None:
    score = normal(n, n)
    assert len(assign(score)) == n
    score[1, 2] = bad
    for solve in (assign, solve_assignments):
        with pytest.raises(SymmetryError, match=f"assignment of {n}"):
            solve(score)
