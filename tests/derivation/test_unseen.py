"""What the example inputs do not show is not taken for a symmetry."""

import pytest
import torch
from custom_modules import Units
from torch import nn
from torch.nn import functional

import symmerge as sm
from symmerge.models.canonical.form import canonicalize
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes, Permutation


class Experts(nn.Module):
    """Every token takes one of eight experts, all of which are computed."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 8, bias=False)
        self.up = nn.ModuleList(nn.Linear(6, 5) for _ in range(8))
        self.down = nn.ModuleList(nn.Linear(5, 4) for _ in range(8))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        answer = 0
        for at, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            taken = (scores.argmax(-1) == at) * scores[:, at]
            answer = answer + down(functional.gelu(up(x))) * taken[:, None]
        return answer


class Scores(nn.Module):
    """Attention that reads a stream before its norm."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.inner(x)
        scores = self.q(x) @ self.k(x).mT
        return self.head(self.norm(x + self.o(scores.softmax(-1) @ self.v(x))))


def made(kind, seed=0):
    torch.manual_seed(seed)
    return kind().double().eval()


def moved(derivation, module, seed=0):
    """A random member of the orbit of a module."""
    model = canonicalize(derivation.load(module))
    element = sm.Alignment.random(model.spec, torch.Generator().manual_seed(seed))
    return derivation.module(sm.apply(element, model))


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


CASES = {  # a short example, and inputs that show more
    Experts: (numbers(2, 6), numbers(300, 6)),
    Scores: (numbers(3, 1, 6), numbers(3, 5, 6)),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_a_table_from_a_short_example_holds_for_all_inputs(kind):
    short, long = CASES[kind]
    module = made(kind)
    derivation = sm.derive(module, short)
    assert any("do not show" in note for note in derivation.notes)
    torch.testing.assert_close(moved(derivation, module)(long), module(long))
    # Control: with inputs that show more, more moves.
    whole = sm.derive(module, long)
    assert not any("do not show" in note for note in whole.notes)
    assert len(whole.spec.hidden) > len(derivation.spec.hidden)
    found = {type(space.group) for space in whole.spec.hidden.values()}
    assert found == ({Permutation} if kind is Experts else {OrthogonalFixingOnes, GeneralLinear})


@torch.no_grad()
def test_no_group_is_taken_because_a_small_example_stays_in_a_linear_part():
    module, x = Units(functional.relu6).double(), numbers(6, 5)
    derivation = sm.derive(module, x / 9)
    (space,) = derivation.spec.hidden.values()
    assert space.group == Permutation(7)
    assert any("not sure whether ScaledPermutation" in note for note in derivation.notes)
    assert not sm.derive(module, 9 * x).notes  # control: there it is refused


@torch.no_grad()
def test_the_mean_of_a_stream_that_is_read_before_its_norm_stays():
    module, x = made(Scores), numbers(3, 5, 6)
    derivation = sm.derive(module, x)
    assert derivation.spec.read_means == ("residual",)
    canonical = derivation.module(canonicalize(derivation.load(module)))
    torch.testing.assert_close(canonical(x), module(x))
