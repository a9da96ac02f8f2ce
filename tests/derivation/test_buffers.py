"""Networks with statistics: buffers that training changes move along, others must be the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.models.canonical.form import canonicalize
from symmerge.symmetry.groups import Permutation, ScaledPermutation


class Block(nn.Module):
    """A layer of a U-Net."""

    def __init__(self, inside, outside, norm):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(inside, outside, 3, padding=1), norm(outside)

    def forward(self, x):
        return functional.relu(self.norm(self.layer(x)), inplace=True)


class Pictures(nn.Module):
    """Down and up again, with a shortcut."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.down, self.low = Block(1, 6, norm), Block(6, 8, norm)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), Block(10, 6, norm)
        self.slope, self.head = nn.PReLU(6), nn.Linear(6, 3)

    def forward(self, x):
        high = self.down(x)
        x = self.up(self.low(functional.max_pool2d(high, 2)))
        x = self.slope(self.last(torch.cat([x, high], 1)))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Shared(nn.Module):
    """One module used twice, under two names, and directions with lengths."""

    def __init__(self):
        super().__init__()
        slope = nn.PReLU()
        self.first, self.second = nn.Linear(5, 9), weight_norm(nn.Linear(9, 8))
        self.a, self.b, self.head = slope, slope, spectral_norm(nn.Linear(8, 3))

    def forward(self, x):
        return self.head(self.b(self.second(self.a(self.first(x)))))


class Waves(nn.Module):
    """Random frequencies, which are never trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(5, 4))
        self.first, self.head = nn.Linear(4, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.first((x @ self.frequencies).sin()).relu())


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(kind, x, seed):
    """A module whose buffers have seen inputs."""
    torch.manual_seed(seed)
    module = kind().double().train()
    for _ in range(3):
        module(2 * torch.randn_like(x) + 1)
    return module.eval()


def groups_of(norm):
    return Pictures if norm is nn.BatchNorm2d else lambda: Pictures(lambda n: nn.GroupNorm(2, n))


CASES = {
    "statistics": (groups_of(nn.BatchNorm2d), numbers(3, 1, 8, 8)),
    "groups": (groups_of(nn.GroupNorm), numbers(3, 1, 8, 8)),
    "shared and normed": (Shared, numbers(4, 5)),
}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_what_training_changes_is_loaded_moved_and_merged(case):
    kind, x = CASES[case]
    torch.manual_seed(0)
    derivation = sm.derive(kind(), x.float())  # fresh: statistics are zeros and ones
    a, b = (trained(kind, x, seed) for seed in (1, 2))
    models = [derivation.load(one) for one in (a, b)]
    torch.testing.assert_close(derivation.module(models[0])(3 * x), a(3 * x))
    model = canonicalize(models[0])
    element = sm.Alignment.random(model.spec, torch.Generator().manual_seed(0))
    moved = derivation.module(sm.apply(element, model))
    torch.testing.assert_close(moved(3 * x), a(3 * x))
    # Control: it moved, and larger groups change the outputs.
    assert any(
        not torch.allclose(one, own) for one, own in zip(*map(_all, (moved, a)), strict=True)
    )
    assert not any(proof.unsure for proof in derivation.proofs)
    aligned = sm.align(*models, "weights")
    torch.testing.assert_close(derivation.module(aligned.aligned)(x), b(x), rtol=1e-6, atol=1e-6)
    assert derivation.module(sm.merge(aligned))(x).isfinite().all()


def _all(module):
    return [*module.parameters(), *(one for one in module.buffers() if one.is_floating_point())]


def test_channels_of_a_convolutional_network_permute():
    for case, group in (("statistics", ScaledPermutation), ("groups", Permutation)):
        kind, x = CASES[case]
        spec = sm.derive(kind(), x).spec
        axes = spec.tensors["down.layer.weight"][0]
        (outer, *_) = axes.factors
        assert isinstance(spec.spaces[outer.space].group, group)


def test_a_buffer_that_nothing_trains_must_be_the_same():
    x = numbers(4, 5)
    first, other = Waves(), Waves()
    derivation = sm.derive(first, x)
    with pytest.raises(MismatchError, match=r"frequencies differs.*nn\.Parameter"):
        derivation.load(other)
    other.frequencies.copy_(first.frequencies)
    assert derivation.load(other)  # control
    assert derivation.load(other.half())  # rounded
