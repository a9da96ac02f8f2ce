"""Stages: windows that are filled up with zeros, and neighbours that are merged."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from differences import apart, difference
from fixtures import checkpoint

import symmerge as sm
from symmerge.checkpoints.files import read_json, write_json
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import UnsupportedModel
from symmerge.lab.small_models import small_model
from symmerge.models.canonical import means
from symmerge.models.orbit import random_member
from symmerge.symmetry.groups import OrthogonalFixingOnes, Permutation
from symmerge.verification.modules import full_module

EXACT, FORBIDDEN = 1e-10, 1e-2


@cache
def load(name, **changes):
    return sm.load(small_model(name, dtype=torch.float64, **changes))


def folded(model, *, padded=True):
    """With all gains folded; not `padded`: shifts as well, wherever there is a bias."""
    norms = tuple(replace(norm, padded=norm.padded and padded) for norm in model.spec.norms)
    return sm.canonicalize(replace(model, spec=replace(model.spec, norms=norms)), ("fold",))


@torch.no_grad()
def apart_on(first, second, side):
    """How much two models' scores of images of another size differ."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(8, 3, side, side, generator=generator, dtype=torch.float64)
    scores = [
        full_module(one, torch.float64)(pixel_values=pixels).logits for one in (first, second)
    ]
    return apart(*scores, softmax=True)


def test_a_shift_does_not_reach_what_fills_a_window():
    model = load("swin-padded")
    assert difference(model, folded(model)) <= EXACT
    assert difference(model, folded(model, padded=False)) >= FORBIDDEN


@pytest.mark.parametrize("side", [18, 22])
def test_images_of_any_size_are_scored_the_same(side):
    model = load("swin")  # whose own images fill every window
    assert difference(model, folded(model, padded=False)) <= EXACT
    assert apart_on(model, folded(model, padded=False), side) >= FORBIDDEN
    for other in (random_member(model, 1)[1], sm.canonicalize(model)):
        assert apart_on(model, other, side) <= EXACT


def test_the_mean_of_a_place_is_seen_by_its_neighbours(monkeypatch):
    model = load("swin")
    assert means._side_by_side(model) == {"residual.stage2"}
    assert difference(model, sm.canonicalize(model, ("fold", "centre"))) <= EXACT
    monkeypatch.setattr(means, "_side_by_side", lambda model: set())
    assert difference(model, sm.canonicalize(model, ("fold", "centre"))) >= FORBIDDEN


@pytest.mark.parametrize("depths", [[1], [1, 1, 1, 1, 1]])
def test_as_many_stages_as_the_config_says(depths):
    count = len(depths)
    heads, side = [2] * count, 4 * 2**count
    model = load("swin", depths=tuple(depths), num_heads=tuple(heads), image_size=side, embed_dim=8)
    first, *others = (model.spec.spaces[stream].group for stream in model.spec.streams)
    assert first == Permutation(8)
    assert others == [OrthogonalFixingOnes(8 * 2**at) for at in range(1, count)]
    assert difference(model, random_member(model, 1)[1]) <= EXACT


def test_stages_without_heads_are_refused(tmp_path):
    folder = checkpoint(tmp_path / "model", "swin")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "num_heads": [2, 4]})
    with pytest.raises(UnsupportedModel, match=r"3 stages in .* and 2"):
        sm.load(folder)


def test_what_the_first_norm_takes_out_is_no_difference():
    model = sm.load(small_model("swin"))
    mean, shift = "swin.embeddings.patch_embeddings.projection.bias", "swin.embeddings.norm.bias"
    assert sm.same(model, raised(model, mean)).same
    assert not sm.same(model, raised(model, shift)).same


def raised(model, name):
    changed = {name: lambda: model.weights[name] + 0.3}
    return model.derive(DerivedWeights(model.weights, changed), step=HistoryStep("edit", name))
