"""Decoders: written in every precision, a member of the orbit is proved to be the same model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import symmerge as sm
from symmerge.errors import MismatchError, UnsupportedModel
from symmerge.lab.small_models import small_model
from symmerge.matching.non_symmetric import ignore_heads
from symmerge.models.orbit import random_member

# a tensor whose damage must be found
TENSORS = {
    "qwen3": "model.layers.0.self_attn.k_norm.weight",
    "qwen3-tied": "model.layers.1.self_attn.q_proj.weight",
    "phi3": "model.layers.1.self_attn.qkv_proj.weight",
    "granite": "model.layers.0.mlp.up_proj.weight",
    "starcoder2": "model.layers.1.mlp.c_fc.weight",
    "stablelm": "model.layers.0.self_attn.q_proj.bias",
    "stablelm-parallel": "model.layers.1.mlp.gate_proj.weight",
    "olmo2": "model.layers.0.self_attn.q_norm.weight",
    "olmo3": "model.layers.1.self_attn.o_proj.bias",
}
# Signs in every precision, the others in one of them in turn.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [
    *(("qwen3", dtype) for dtype in DTYPES),
    *((name, DTYPES[at % 3]) for at, name in enumerate(TENSORS) if name != "qwen3"),
]


def damaged(folder, tensor, into):
    """The checkpoint with one tensor changed by two per cent at random."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    weight = module.state_dict()[tensor]
    assert weight.any()  # else nothing would change
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.copy_(weight.float() * (1 + 0.02 * noise))
    module.save_pretrained(into)
    return sm.load(into)


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_written_member_is_the_same_and_a_damaged_one_is_not(name, dtype, tmp_path):
    source = sm.load(small_model(name, seed=2, dtype=dtype))
    folder = sm.save(random_member(source, 1)[1], tmp_path / "member")
    member = sm.load(folder)
    assert {member.weights.dtype(tensor) for tensor in member.spec.tensors} == {dtype}
    assert sm.verify(source, member).same
    assert sm.same(source, member).same
    assert not sm.same(source, damaged(folder, TENSORS[name], tmp_path / "damaged")).same


def test_norms_of_single_heads_are_refused():
    with pytest.raises(UnsupportedModel, match="qk_layernorm"):
        sm.load(small_model("stablelm", qk_layernorm=True))
    assert sm.load(small_model("stablelm", qk_layernorm=False)).spec.family == "stablelm"


@pytest.mark.parametrize("name", ["qwen3", "olmo2"])
def test_normed_pairs_keep_their_places_in_every_method(name):
    # Four heads of their own keys: only the rotary positions are in the way.
    model = sm.load(small_model(name, num_key_value_heads=4))
    with pytest.raises(MismatchError, match="permutations are not a symmetry of a Signs space"):
        model.restrict(qk="permutation")
    with pytest.raises(MismatchError, match="no rotary positions"):
        ignore_heads(model)
    with pytest.raises(MismatchError, match="turn with their positions"):
        sm.average(model, model, attention="circuits")
    assert ignore_heads(sm.load(small_model("gpt2")))  # the control
