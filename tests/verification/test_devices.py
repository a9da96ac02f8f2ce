"""Verification where the weights are: nothing may stay behind on the processor.

The device "meta" holds shapes alone, so it is there on every machine; what mixes devices fails.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights, PlacedWeights
from symmerge.lab.small_models import small_model
from symmerge.models.model import Model
from symmerge.verification import modules, transport
from symmerge.verification.axis_maps import AxisMap
from symmerge.verification.inputs import samples
from symmerge.verification.rounding import rounded_again

META = torch.device("meta")


def elsewhere(name: str) -> Model:
    model = sm.load(small_model(name))
    return replace(model, weights=PlacedWeights(model.weights, META))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_runs_happen_where_the_weights_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)  # no shape has numbers
    model = rounded_again(elsewhere(name), 0, torch.float32)
    for sample in samples(model, 0, long=False):
        if not sample.layers:  # asks what a norm makes of a constant, which no shape answers
            continue
        for logits in modules.logits_of(model, sample).values():
            assert logits.device == META


def test_a_tensor_that_stays_behind_is_noticed() -> None:
    model = elsewhere("bert")
    kept = {name: (lambda: torch.ones(48)) for name in model.weights if "LayerNorm" in name}
    mixed = replace(model, weights=DerivedWeights(model.weights, kept))
    with pytest.raises(RuntimeError, match="device"):
        modules.logits_of(mixed, samples(model, 0, long=False)[0])


def test_maps_of_axes_agree_on_a_gpu_and_a_processor() -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in range(12)])
    factor = torch.randn(12, 3, generator=generator).double()
    x = torch.randn(12, 5, generator=generator).double()
    sparse, torn = AxisMap(factor, index), AxisMap(factor, index.roll(1, 0))
    for here, there in ((sparse.apply, sparse.gathered), (sparse.transpose, sparse.scattered)):
        assert torch.allclose(here(x), there(x), rtol=1e-12)
    assert not torch.allclose(sparse.apply(x), torn.gathered(x), rtol=1e-2)


def test_errors_of_sums_grow_with_columns_as_with_rows() -> None:
    """A GPU adds one term after the other; units that are scaled up err as much more."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(1024, 1024, generator=generator)).Q
    scales = torch.randn(256, generator=generator).exp()
    before = torch.randn(1024, 256, generator=generator) * scales
    after = torch.zeros(1024, 256)
    for number in range(1024):
        after += rotation[:, number, None] * before[number]
    maps = AxisMap(rotation.double()), AxisMap.identity(256)
    assert compared(before, after, maps) is None
    assert compared(before, after * (1 + 1e-3 * torch.eye(1024, 256)), maps) is not None


def compared(before: torch.Tensor, after: torch.Tensor, maps: tuple[AxisMap, AxisMap]) -> object:
    tensor = transport._Transported(before, after, *maps, torch.float32)
    return transport._problem(tensor, "weight")
