"""Strange configs: one line with a remedy, the same in every verb."""

import json
import os

import pytest
import torch
from fixtures import run
from strange import (
    INF,
    NAN,
    copy_of,
    one_line,
    refused,
    set_config,
    sources,
)

from symmerge.families.spaces import ACTIVATIONS
from symmerge.models import stock
from symmerge.models.model import load

__all__ = ["copy_of", "sources"]  # fixtures

# configs: family -> field -> values that it cannot have

SIZES = (-1, 0, 1.5, True, 10**9, 10**30, "wide", [], {}, NAN)
SHARES = (-0.5, 1.5, NAN, INF, "much", [0.1])
EPSILONS = (-1e-5, NAN, INF, "1e-5", [])
LABELS = ([1], "three", {"a": 1}, {"0": 5})
NESTED = ([["X"]], [1], {}, [None], "GPT2LMHeadModel", [{}])
CONFIGS = {
    "gpt2": {
        "activation_function": ("foo", "prelu", "xielu", "", 5, ["gelu"], "x" * 3000),
        "n_head": SIZES,
        "num_attention_heads": (1.5, -1),
        "n_embd": (-48, 0, 10**12),
        "vocab_size": (-1, 0, 10**15),
        "resid_pdrop": SHARES,
        "embd_pdrop": SHARES,
        "layer_norm_epsilon": EPSILONS,
        "architectures": NESTED,
        "model_type": (["gpt2"], 5, {}, "x" * 10**6, "GPT2"),
        "pad_token_id": (10**30, "0", 1.5),
        "num_labels": (10**9, 10**30, -1, INF),
        "text_config": ({}, {"model_type": "gpt2"}, 5),
        "sliding_window": (1.5, "8", {}),
    },
    "llama": {
        "hidden_act": ("foo", "xielu"),
        "num_key_value_heads": (0, -2, 3, 10**9),
        "head_dim": (0, -12, 24, 13),
        "attention_dropout": SHARES,
        "rms_norm_eps": EPSILONS,
        "rope_parameters": (
            *({"rope_type": "foo", "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": -1}),
            *({"rope_type": "default", "rope_theta": NAN}, {"rope_theta": "big"}, 5, "default"),
            {"rope_type": "linear", "rope_theta": 1e4, "factor": "two"},
        ),
        "max_position_embeddings": (-1, 1.5, 10**30),
    },
    "qwen2": {
        "num_hidden_layers": (10**9, -1),
        "layer_types": (["full_attention"], ["foo", "bar"], "full_attention", [1, 2]),
    },
    "bert-classifier": {
        "id2label": ({str(n): "x" for n in range(100_001)}, *LABELS),
        "hidden_dropout_prob": SHARES,
        "classifier_dropout": (2, -1),
        "type_vocab_size": (-1, 10**9),
        "pad_token_id": (200, -200),
    },
    "modernbert": {"norm_eps": EPSILONS, "local_attention": (-1, "all"), "pad_token_id": (10**9,)},
    # which its config does not declare, and its class reads
    "deberta-v2": {
        "conv_act": ("foo", 5),
        "attention_head_size": (24, 48),
        "embedding_size": (-1, 24),
    },
    "deepseek_v3": {"n_group": (4,)},
    "neox": {"partial_rotary_factor": (2.0, "half")},
    "vit": {"image_size": ([16], "large", [16, 16, 16], -16, 10**9), "patch_size": (0, [])},
    "swin": {
        "depths": ([10**9, 2, 1], [2, 2, 0], [], [2], [1] * 9, 2),
        "num_heads": ([2, 4], [2, 4, 3], [2, 4, 0], "many"),
        "window_size": (3, -1),
    },
    "dinov3": {"image_size": (10**6, 0), "drop_path_rate": (3,), "rope_theta": (-1.0, NAN)},
}
CASES = [
    pytest.param(name, field, value, id=f"{name} {field} {str(value)[:20]}")
    for name, fields in CONFIGS.items()
    for field, values in fields.items()
    for value in values
]
LATER = {"pad_token_id", "rope_parameters"}  # seen only when the class is built


@pytest.mark.parametrize(("name", "field", "value"), CASES)
def test_config(sources, tmp_path, name, field, value):
    """No weights are needed to refuse it; `inspect`, which builds no class, refuses it as well."""
    folder = tmp_path / name
    folder.mkdir()
    for file in sources(name).iterdir():
        os.link(file, folder / file.name)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**content, field: value}))
    said = refused(folder)
    assert "config.json" in said or "no table" in said
    if field not in LATER:
        assert refused(folder, check_class=False) == said


@pytest.mark.quick
def test_a_config_of_gigabytes(copy_of):
    folder = copy_of("gpt2")
    with open(folder / "config.json", "r+b") as file:
        file.truncate(6 * 10**9)  # sparse: nothing is on disk
    assert "at most" in refused(folder)


def test_every_good_config_passes(sources):
    for name in CONFIGS:
        assert load(sources(name)).parameters > 0


# Settings of files on the hub, most of them of who trained the model: no class reads them.
HUB = {
    "bloom": {"bias_dropout_fusion": True, "n_inner": None},
    "cohere2": {"order_of_interleaved_layers": "local_attn_first"},
    "deberta-v2": {"attention_head_size": 12},
    "deepseek_v3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        }
    },
}


@pytest.mark.parametrize("name", HUB)
def test_settings_of_the_hub_pass(copy_of, name):
    folder = copy_of(name)
    set_config(folder, **HUB[name])
    assert load(folder).config.items() >= HUB[name].items()


def test_a_class_is_built_once_for_equal_configs_and_again_for_others(sources, copy_of):
    stock._shared.cache_clear()
    stock._run_stock.cache_clear()
    folder = copy_of("gpt2")
    for same in (sources("gpt2"), folder):
        load(same)
    assert stock._shared.cache_info().misses == stock._run_stock.cache_info().misses == 1
    set_config(folder, resid_pdrop=-0.5)  # only the class itself refuses it
    assert refused(folder) == refused(folder)
    set_config(folder, resid_pdrop=0.2)
    load(folder)
    assert stock._run_stock.cache_info().misses == 2


def test_activations_are_those_without_weights():
    from transformers.activations import ACT2FN

    assert ACT2FN.keys() >= ACTIVATIONS
    for name in ACTIVATIONS:
        assert not list(ACT2FN[name].parameters())
        x = torch.randn(7, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(ACT2FN[name](x)[3], ACT2FN[name](x[3:4])[0]), "not unit by unit"


def test_a_class_with_more_tensors_than_the_checkpoint(copy_of):
    folder = copy_of("gpt2")
    set_config(folder, add_cross_attention=True)
    assert "crossattention" in refused(folder)


def test_every_verb_refuses_at_once(sources, copy_of, tmp_path):
    folder, good, out = copy_of("gpt2"), sources("gpt2"), tmp_path / "out"
    run("random", good, "--out", tmp_path / "moved")
    set_config(folder, activation_function="foo")
    lines = {
        one_line("inspect", folder),
        one_line("verify", good, folder),
        one_line("same", folder, good),
        one_line("canonical", folder, "--out", out),
        one_line("random", folder, "--out", out, "--no-verify"),
        one_line("apply", tmp_path / "moved" / "alignment.safetensors", folder, "--out", out),
        one_line("align", good, folder, "--out", out),
        one_line("merge", folder, good, "--out", out),
    }
    assert len(lines) == 1 and "activation_function 'foo'" in lines.pop() and not out.exists()


def test_what_is_only_returned_otherwise_is_no_fault(copy_of):
    """`return_dict` and chunks change no function: such a config works."""
    folder = copy_of("bert-classifier")
    set_config(folder, return_dict=False, chunk_size_feed_forward=7)
    run("verify", folder, folder)
