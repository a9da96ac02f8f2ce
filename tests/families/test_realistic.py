"""Real sizes, 12 layers and 768 wide, in float32: differences stay within rounding."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.lab.small_models import perturb
from symmerge.models.orbit import random_member
from symmerge.verification.written import run_briefly

# Vocabularies, positions and images are small: they cost time and add neither depth nor width.
TEXT = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 2000,
    "max_position_embeddings": 128,
}
# name -> transformers class, config, and the tensor that moves alone in the control: a map in a
# middle layer that writes the stream
REALISTIC = {
    "bert-base": ("BertForMaskedLM", TEXT, "bert.encoder.layer.6.output.dense.weight"),
    "gpt2-small": (
        "GPT2LMHeadModel",
        {"vocab_size": 2000, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0},
        "transformer.h.6.mlp.c_proj.weight",
    ),
    "llama": (
        "LlamaForCausalLM",
        {**TEXT, "num_key_value_heads": 4, "intermediate_size": 2048},
        "model.layers.6.mlp.down_proj.weight",
    ),
}


def realistic(architecture, config):
    kind = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = kind(kind.config_class(**config))
    perturb(module)
    return sm.load(module)


@pytest.mark.parametrize("name", REALISTIC)
def test_a_random_member_of_real_size_computes_the_same_in_float32(name):
    architecture, config, tensor = REALISTIC[name]
    model = realistic(architecture, config)
    assert model.spec.sizes["residual"] == 768 and "ff.11" in model.spec.hidden
    _, member = random_member(model, 1)
    verdict = run_briefly(model, member)
    assert verdict.dtype == "float32" and verdict.difference <= 1e-4
    # Control: one tensor that moves alone shows, at this depth too.
    moved = DerivedWeights(model.weights, {tensor: partial(member.weights.__getitem__, tensor)})
    assert run_briefly(model, replace(model, weights=moved)).difference >= 1e-2
