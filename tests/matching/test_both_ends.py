"""Moving both ends of a line is moving one of them: what a published rival's option can change."""

import pytest
import torch
from negative_controls import regroup

import symmerge as sm
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment, apply
from symmerge.symmetry.groups import GeneralLinear
from symmerge.verification.inputs import samples
from symmerge.verification.modules import logits_of


def one_layer(name):
    return {"n_layer" if name == "gpt2" else "num_hidden_layers": 1}


def pair(name):
    models = (
        small_model(name, seed=seed, dtype=torch.float64, **one_layer(name)) for seed in (0, 1)
    )
    return [sm.canonicalize(sm.load(model)) for model in models]


def element(model, seed):
    return Alignment.random(model.spec, torch.Generator().manual_seed(seed))


def apart(one, other):
    sample = samples(one, 0)[0]
    x, y = (logits_of(which, sample, dtype=torch.float64)["logits"] for which in (one, other))
    x, y = (logits - logits.mean(-1, keepdim=True) for logits in (x, y))
    return ((x - y).norm() / x.norm()).item()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "ijepa"])
@pytest.mark.parametrize("t", [0.5, 0.2])
def test_only_the_relative_element_matters(name, t):
    """(1 - t) g A + t h B = g ((1 - t) A + t g^-1 h B), and g changes no model's function."""
    a, b = pair(name)
    g, h = element(a, 2), element(b, 3)
    both = sm.average(apply(g, a), apply(h, b), t)
    relative = sm.average(a, apply(g.inverse().compose(h), b), t)
    assert apart(both, relative) <= 1e-9
    assert apart(both, sm.average(a, apply(h, b), t)) > 1e-2  # the control: g left out


def test_a_common_map_that_is_no_symmetry_matters():
    """As with soft permutations: a mixture of units of both ends is another function."""
    a, b = (regroup(model, "ff", GeneralLinear) for model in pair("gpt2"))
    still, moved = Alignment.identity(a.spec).elements, element(a, 2).elements
    units = {name: moved[name] for name in moved if name.startswith("ff")}
    g = Alignment(a.spec, {**still, **units})
    assert apart(sm.average(apply(g, a), apply(g, b)), sm.average(a, b)) > 1e-2
