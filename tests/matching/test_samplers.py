"""Samplers: shares are drawn as their names say, the same ones for the same seed."""

import pytest
import torch

from symmerge.errors import MismatchError
from symmerge.matching.learning.samplers import NAMED, Sampler

DRAWS = 400
# name -> the range it draws from, its mean and its deviation
FORMS = {
    "fixed:0.3": (0.3, 0.3, 0.3, 0.0),
    "uniform:0.2,0.8": (0.2, 0.8, 0.5, 0.6 / 12**0.5),
    "uniform:0.7,0.7": (0.7, 0.7, 0.7, 0.0),
    "uniform:0,0.1": (0.0, 0.1, 0.05, 0.1 / 12**0.5),
    "normal:0.5,0.05": (0.0, 1.0, 0.5, 0.05),
    "beta:2,2": (0.0, 1.0, 0.5, 0.05**0.5),
    "beta:8,2": (0.0, 1.0, 0.8, 0.12060453783110545),
}


def drawn(name, seed=0, draws=DRAWS):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([Sampler(name).draw(generator) for _ in range(draws)], dtype=torch.float64)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_draws_in_its_range_and_as_it_says(name):
    low, high, mean, deviation = FORMS[name]
    shares = drawn(name)
    assert low <= shares.min() and shares.max() <= high
    assert abs(shares.mean() - mean) <= 4 * deviation / DRAWS**0.5 + 1e-12
    assert shares.std().item() == pytest.approx(deviation, rel=0.15, abs=1e-12)


def test_what_a_normal_draws_outside_is_clipped():
    shares = drawn("normal:0.9,0.5")
    assert (
        shares.min() >= 0 and shares.max() == 1.0 and 0.2 < (shares == 1).double().mean() < 0.7
    )  # 42% lie above 1
    assert (drawn("normal:0.5,0.05") == 1).sum() == 0  # the control


PUBLISHED = {
    "narrow": "uniform:0.4,0.6",
    "fixed": "fixed:0.5",
    "wide": "uniform:0,1",
    "normal": "normal:0.5,0.1",
}


def test_the_published_ones_have_names():
    assert NAMED == PUBLISHED
    for name, form in PUBLISHED.items():
        assert torch.equal(drawn(name, draws=20), drawn(form, draws=20))
    assert (
        drawn("narrow").min() >= 0.4
        and drawn("narrow").max() <= 0.6 < drawn("wide").max()
        and drawn("wide").min() < 0.4
    )


@pytest.mark.parametrize("name", ["narrow", "wide", "normal", "beta:2,2"])
def test_the_same_generator_draws_the_same(name):
    first, again, other = (drawn(name, seed, draws=5) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(first.unique()) == 5  # a new one each time


@pytest.mark.parametrize("name", [*PUBLISHED, "beta:2,2"])
def test_nobody_elses_numbers_are_disturbed(name):
    before = torch.get_rng_state()
    drawn(name, draws=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)  # nor does anybody else disturb ours
    first = drawn(name, draws=3)
    torch.set_rng_state(before)
    assert torch.equal(first, drawn(name, draws=3))


WRONG = {
    "no such": ("triangle", "narow", "", ":", "narrow:0.5", "gamma:1,1", "Fixed:0.5"),
    "numbers": (
        "uniform",
        "beta",
        "uniform:0.5",
        "uniform:0.1,0.5,0.9",
        "fixed:half",
        "fixed:",
        "fixed:0.5,",
        "normal:0.5",
        "beta:2",
    ),
    "range": (
        "fixed:1.5",
        "fixed:-0.1",
        "uniform:0.6,0.4",
        "uniform:-0.1,0.5",
        "uniform:0.5,2",
        "normal:1.5,0.1",
        "normal:0.5,-0.1",
        "beta:0,1",
        "beta:-1,1",
    ),
    "nan": ("fixed:nan", "uniform:nan,1", "normal:0.5,nan", "beta:nan,1", "fixed:inf"),
}


@pytest.mark.parametrize("name", [name for names in WRONG.values() for name in names])
def test_wrong_ones_are_refused_with_the_list(name):
    with pytest.raises(MismatchError) as refused:
        Sampler(name)
    said = str(refused.value)
    assert f"'{name}'" in said or f"sampler {name}:" in said
    assert (
        all(form in said for form in (*NAMED, "fixed:0.5", "uniform:", "normal:", "beta:"))
        and "\n" not in said
    )
