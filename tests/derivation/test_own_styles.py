"""Modules written in ways that stock models are not: found, proved, aligned and told apart."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import symmerge as sm
from symmerge.models.canonical.form import canonicalize
from symmerge.models.orbit import random_member
from symmerge.symmetry.groups import GeneralLinear, Orthogonal, SignedPermutation

TOKENS = torch.randint(1, 40, (3, 7), generator=torch.Generator().manual_seed(0))
WIDTH, HEADS = 16, 2


class CosineAttention(nn.Module):
    """No norms, so the stream may change its basis; scores are cosines with a temperature."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(40, WIDTH)
        self.places = nn.Parameter(torch.randn(12, WIDTH))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heat = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.maps)
        scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT
        mixed = (scores * self.heat.exp()).softmax(-1) @ v
        return self.head(x + self.o(mixed.transpose(1, 2).flatten(2)))

    @property
    def maps(self):
        return self.q, self.k, self.v


STYLES = {CosineAttention: TOKENS}


def made(kind, seed=0):
    torch.manual_seed(seed)
    return kind()


@pytest.fixture(scope="module", params=STYLES, ids=lambda kind: kind.__name__)
def models(request):
    kind = request.param
    derivation = sm.derive(made(kind), STYLES[kind])
    return derivation, *(derivation.load(made(kind, seed)) for seed in range(2))


def test_a_member_of_the_orbit_is_the_same_and_another_seed_is_not(models):
    _, a, b = models
    assert sm.same(a, random_member(a, 1)[1]).same
    assert not sm.same(a, b).same


def test_two_seeds_are_aligned_and_their_functions_kept(models):
    _, a, b = models
    aligned = sm.align(a, b, "weights")
    assert sm.verify(aligned.aligned, b).same and not sm.verify(aligned.aligned, a).same
    assert aligned.after < aligned.before


def test_spaces_that_meet_in_one_matrix_are_balanced_in_turns():
    derivation = sm.derive(made(CosineAttention), TOKENS)
    groups = {name: space.group for name, space in derivation.spec.hidden.items()}
    assert groups["residual"] == GeneralLinear(WIDTH)
    assert (groups["qk"], groups["vo"]) == tuple(
        g(WIDTH // HEADS) for g in (Orthogonal, GeneralLinear)
    )
    model = derivation.load(made(CosineAttention))
    forms = [canonicalize(one) for one in (model, random_member(model, 1)[1])]
    assert all(sm.verify(form, model).same for form in forms)
    lengths = [[form.weights[name].norm() for name in sorted(model.weights)] for form in forms]
    torch.testing.assert_close(*lengths, rtol=1e-4, atol=0)


def test_parts_that_the_example_inputs_do_not_reach_stay():
    derivation = sm.derive(made(CosineAttention), TOKENS)
    places = next(line for line in derivation.lines if line.startswith("places"))
    assert places.split()[1:] == ["shown12", "residual"]
    assert any("places: 5 coordinates of axis 0 are not reached" in one for one in derivation.notes)
    whole = sm.derive(made(CosineAttention), TOKENS.repeat(1, 2)[:, :12])
    assert not whole.notes


class Recurrent(nn.Module):
    """Gates are written in their place, and states begin with zeros."""

    def __init__(self, kind, **options):
        super().__init__()
        self.inner = kind(5, 6, batch_first=True, **options)
        self.head = nn.Linear(6 * (1 + self.inner.bidirectional), 3)

    def forward(self, x):
        return self.head(self.inner(x)[0])


CELLS = {
    "LSTM": (nn.LSTM, {"num_layers": 2}),
    "GRU": (nn.GRU, {"bidirectional": True}),
    "RNN": (nn.RNN, {}),
}


@torch.no_grad()
@pytest.mark.parametrize("cell", CELLS)
def test_units_of_recurrent_networks_permute_with_signs(cell):
    kind, options = CELLS[cell]
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module = Recurrent(kind, **options)
    derivation = sm.derive(module, x)
    spaces = derivation.spec.hidden.values()
    assert [space.group for space in spaces] == [SignedPermutation(6)] * (1 if cell == "RNN" else 2)
    assert not any(proof.unsure for proof in derivation.proofs)
    moved = derivation.module(random_member(derivation.load(module), 1)[1])
    torch.testing.assert_close(moved(3 * x.repeat(1, 2, 1)), module(3 * x.repeat(1, 2, 1)))
