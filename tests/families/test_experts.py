"""Mixtures of experts: files that hold them one by one, routes that rounding changes, recovery."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import symmerge as sm
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import CheckpointError, UnsupportedModel
from symmerge.lab.small_models import small_model
from symmerge.models.orbit import random_member
from symmerge.verification.inputs import samples

MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder as transformers writes it: one tensor for each expert."""
    folder = tmp_path_factory.mktemp("hub")
    small_model("mixtral").save_pretrained(folder)
    return folder


def spoiled(hub, tmp_path, change):
    folder = tmp_path / "spoiled"
    folder.mkdir()
    (folder / "config.json").write_bytes((hub / "config.json").read_bytes())
    tensors = load_file(hub / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# Bare models have no prefix, and some heads another: their parts are found as well.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, None) for name in MOE),
        ("qwen3_moe", "Qwen3MoeForQuestionAnswering"),
        ("mixtral", "MixtralModel"),
    ],
)
def test_experts_are_read_one_by_one_and_written_together(name, kind, tmp_path):
    module = small_model(name, kind=kind)
    module.save_pretrained(tmp_path / "hub")
    stored = load_file(tmp_path / "hub" / "model.safetensors")
    layers = 2 - getattr(module.config, "first_k_dense_replace", 0)
    assert sum(".experts.3." in tensor for tensor in stored) == 3 * layers
    model = sm.load(tmp_path / "hub")
    assert sm.verify(model, sm.load(module)).difference == 0
    folder = sm.save(random_member(model, 1)[1], tmp_path / "member")
    member, info = type(module).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert sm.verify(sm.load(member), model).same


EXPERT = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
SPOILT = {
    "missing": (lambda tensors: tensors.pop(EXPERT.format(3)), "parts of .* are missing"),
    "another shape": (
        lambda tensors: tensors.update({EXPERT.format(1): torch.zeros(95, 48)}),
        "differ in shape",
    ),
    "a number too large": (
        lambda tensors: tensors.update({EXPERT.format(10**12): tensors.pop(EXPERT.format(3))}),
        "parts of .* are missing",
    ),
    "whole and in parts": (
        lambda tensors: tensors.update(
            {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 192, 48)}
        ),
        "whole and in parts",
    ),
}


@pytest.mark.parametrize("case", SPOILT)
def test_experts_that_do_not_fit_are_refused(case, hub, tmp_path):
    change, reason = SPOILT[case]
    with pytest.raises(CheckpointError, match=reason):
        sm.load(spoiled(hub, tmp_path, change))
    assert sm.load(hub).spec.family == "mixtral"


def edited(model, tensor, change):
    changed = {tensor: lambda: change(model.weights[tensor].clone())}
    return model.derive(DerivedWeights(model.weights, changed), step=HistoryStep("edit", tensor))


def test_rounding_that_sends_tokens_elsewhere_is_no_other_function(tmp_path):
    source = sm.load(small_model("mixtral", seed=2, dtype=torch.bfloat16))
    member = sm.load(sm.save(random_member(source, 1)[1], tmp_path / "member"))
    verdict = sm.verify(source, member)
    assert verdict.same and verdict.difference > 2 * verdict.rounding  # some went elsewhere
    # Controls: a router, and one unit of one expert, a tenth off.
    for tensor in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.down_proj"):
        wrong = edited(member, tensor, lambda weight: weight * (1 + 0.1 * torch.rand(weight.shape)))
        assert not sm.verify(source, wrong).same


def test_every_token_visits_all_experts_where_single_places_are_judged():
    kinds = [
        (sample.every_expert, sample.typical)
        for sample in samples(sm.load(small_model("mixtral")), 0)
    ]
    assert kinds[:2] == [(True, False), (False, True)]
    plain = samples(sm.load(small_model("llama")), 0)
    assert not any(sample.every_expert or sample.typical for sample in plain)


def test_values_do_not_pass_a_sink():
    # The control: with a sink beside them, attention weights do not sum to one.
    model = sm.load(small_model("gpt_oss", dtype=torch.float64))
    spaces = {
        name: replace(space, translation="passes") if name.startswith("vo.") else space
        for name, space in model.spec.spaces.items()
    }
    passing = replace(model, spec=replace(model.spec, spaces=spaces))
    assert [step.step for step in sm.canonicalize(model, ("values", "keys")).history] == []
    moved = sm.canonicalize(passing, ("values",))
    assert sm.verify(model, moved, dtype=torch.float64).difference >= 1e-2


def test_layers_without_experts_are_refused():
    with pytest.raises(UnsupportedModel, match="without experts"):
        sm.load(small_model("qwen3_moe", mlp_only_layers=[1]))
    with pytest.raises(UnsupportedModel, match="clip_qkv"):
        sm.load(small_model("olmoe", clip_qkv=5.0))


def test_planted_experts_are_given_back_to_their_places():
    model = sm.load(small_model("mixtral", dtype=torch.float64))
    moved_by, moved = random_member(model, 1)
    found = sm.align(model, moved, sm.AlignOptions(effort="fast"))
    for layer in range(2):
        there, back = (
            alignment[f"expert.{layer}"]["index"]
            for alignment in (moved_by, found.solution.alignment)
        )
        assert not torch.equal(there, torch.arange(4))
        assert torch.equal(there[back], torch.arange(4))
