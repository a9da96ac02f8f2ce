"""A narrow model in a wider architecture: no logit changes, and what is unlike is refused."""

import importlib
import inspect
import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from differences import difference

import symmerge as sm
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import FunctionChanged, MismatchError
from symmerge.lab.small_models import small_model
from symmerge.matching.recipes import RECIPES
from symmerge.models.orbit import random_member
from symmerge.models.widening import Places, orthonormal, widen
from symmerge.symmetry.notation import Role
from symmerge.verification.inputs import samples
from symmerge.verification.written import gate

module = importlib.import_module("symmerge.models.widening")
EXACT = 1e-10

# Narrow models: 4 heads of 12, stream of 48, 96 units; Llama: 2 key-value heads.
WIDER = {
    "gpt2": {
        "stream": {"n_embd": 60},
        "units": {"n_inner": 300},  # more than three times as many
        "heads": {"n_embd": 72, "n_head": 6},
        "larger heads": {"n_embd": 96},
        "more and larger heads": {"n_embd": 100, "n_head": 5, "n_inner": 97},
    },
    "gpt2-untied": {"all": {"n_embd": 100, "n_head": 5, "n_inner": 130}},
    "vit": {
        "all": {"hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 130},
        "twice": {"hidden_size": 96, "intermediate_size": 192},
    },
    "vit-tanh": {"all": {"hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 130}},
    "llama": {
        "stream": {"hidden_size": 60, "head_dim": 12},
        "groups": {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "intermediate_size": 130,
        },
        "queries": {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
        },
        "both": {
            "hidden_size": 108,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "intermediate_size": 200,
        },
    },
    "llama-mqa": {
        "all": {
            "hidden_size": 60,
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 130,
        }
    },
    "mistral": {"all": {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}},
    "qwen2": {
        "all": {
            "hidden_size": 96,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 130,
        }
    },
    "qwen3": {
        "all": {"hidden_size": 80, "num_attention_heads": 6, "num_key_value_heads": 3},
    },
    "phi3": {"all": {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}},
    "granite": {"all": {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}},
    "starcoder2": {"all": {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}},
    "stablelm": {"all": {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}},
    "neox": {"all": {"hidden_size": 72, "num_attention_heads": 6, "intermediate_size": 130}},
    "modernbert": {"units": {"intermediate_size": 300}},
    "modernbert-classifier": {"units": {"intermediate_size": 130}},
    "neox-sequential": {"all": {"hidden_size": 60, "num_attention_heads": 5}},
}
CASES = [(name, label) for name, by in WIDER.items() for label in by]
FAMILIES = [
    ("gpt2", "more and larger heads"),
    ("gpt2-untied", "all"),
    ("vit", "all"),
    ("llama", "both"),
    ("neox", "all"),
]
both_units = pytest.mark.parametrize("units", ["zero", "split"])


@cache
def loaded(name, seed=0, dtype=torch.float64, **changes):
    return sm.load(small_model(name, seed=seed, dtype=dtype, **changes))


def pair(name, label, dtype=torch.float64):
    return loaded(name, dtype=dtype), loaded(name, 1, dtype, **WIDER[name][label])


# the same function in the wide architecture


@both_units
@pytest.mark.parametrize(("name", "label"), CASES)
def test_no_logit_changes(name, label, units):
    narrow, wide = pair(name, label)
    widened = widen(narrow, wide, units=units)
    verdict = sm.verify(narrow, widened, dtype=torch.float64)
    assert verdict.same and verdict.difference <= EXACT
    assert (
        widened.spec.fingerprint
        == sm.canonicalize(wide).spec.fingerprint
        != narrow.spec.fingerprint
    )
    assert difference(sm.canonicalize(widened), narrow) <= EXACT
    assert (
        difference(wide, narrow) >= 1e-2
    )  # the control: the wide model itself is another function


def test_a_model_as_wide_is_left_as_folded():
    narrow, wide = loaded("vit"), loaded("vit", 1)
    widened, folded = widen(narrow, wide), sm.canonicalize(narrow, ("fold",))
    assert all(torch.equal(widened.weights[name], folded.weights[name]) for name in folded.weights)


def test_scores_that_are_not_scaled_need_no_correction():
    narrow, wide = (
        loaded("gpt2", seed, scale_attn_weights=False, **changes)
        for seed, changes in ((0, {}), (1, {"n_embd": 96}))
    )
    assert difference(widen(narrow, wide), narrow) <= EXACT


def test_a_shift_that_stays_in_its_norm_is_read_along_the_ones_too():
    # GPT-2's head has no bias: its last norm keeps a shift, whose mean the head reads.
    narrow, wide = pair("gpt2", "stream")
    widened = widen(narrow, wide)
    shift = widened.weights["transformer.ln_f.bias"]
    assert shift.mean().abs() > 1e-3 and difference(widened, narrow) <= EXACT
    assert (
        difference(with_tensor(widened, "transformer.ln_f.bias", shift - shift.mean()), narrow)
        >= 1e-4
    )


@both_units
def test_extra_units_are_dead_or_share(units):
    narrow, wide = pair("gpt2", "units")
    widened = widen(narrow, wide, units=units, seed=3)
    name = "transformer.h.0.mlp.{}.weight"
    enter, leave = widened.weights[name.format("c_fc")], widened.weights[name.format("c_proj")]
    if units == "zero":
        assert not enter[:, 96:].any() and not leave[96:].any() and enter[:, :96].any()
        return
    copies = (enter[:, :, None] == enter[:, None, :]).all(0)  # 300 = 3 x 96 + 12
    assert sorted(copies.sum(1).tolist()) == [3] * 84 * 3 + [4] * 12 * 4
    original = sm.canonicalize(narrow, ("fold",)).weights[name.format("c_proj")]
    assert torch.allclose(copies[:96].double() @ leave, original)
    other = widen(narrow, wide, units=units, seed=4).weights[name.format("c_fc")]
    assert not torch.equal(other, enter) and torch.equal(
        widen(narrow, wide, units=units, seed=3).weights[name.format("c_fc")], enter
    )


@pytest.mark.parametrize("fixing_ones", [False, True])
def test_the_stream_lies_in_the_wide_one_orthonormally(fixing_ones):
    found = orthonormal(5, 8, fixing_ones=fixing_ones)
    assert torch.allclose(found.mT @ found, torch.eye(5, dtype=torch.float64))
    moved = found @ torch.ones(5, dtype=torch.float64)
    assert torch.allclose(moved, (5 / 8) ** 0.5 * torch.ones(8, dtype=torch.float64)) == fixing_ones


@both_units
@pytest.mark.parametrize(("name", "label"), FAMILIES)
def test_a_random_symmetry_keeps_the_function(name, label, units):
    narrow, wide = pair(name, label)
    assert difference(random_member(widen(narrow, wide, units=units), seed=2)[1], narrow) <= EXACT


# negative controls: each mistake is seen by `verify`


def with_tensor(model, name, tensor):
    tensors = {key: model.weights[key] for key in model.weights} | {name: tensor}
    source = replace(model.source, base=MemoryWeights(tensors), digests={})
    return replace(model, weights=source, source=source)


def skewed(size, room, *, fixing_ones):
    return orthonormal(size, room, fixing_ones=fixing_ones) * torch.linspace(
        0.9, 1.1, size, dtype=torch.float64
    )


def tilted(size, room, *, fixing_ones):
    return orthonormal(size, room, fixing_ones=False)


def unshared(index, scale):
    return Places(index, {**scale, Role.READS: scale[Role.WRITES]})


# what is done wrong, and the families and units in which that matters
MISTAKES = {
    "stretched by a little more": (
        "stretch",
        lambda size, room: 1.01 * (room / size) ** 0.5,
        ("gpt2", "llama"),
        ("zero", "split"),
    ),
    "not stretched": ("stretch", lambda size, room: 1.0, ("gpt2", "llama"), ("zero", "split")),
    "not orthonormal": ("orthonormal", skewed, ("gpt2", "llama"), ("zero", "split")),
    "the ones direction lost": ("orthonormal", tilted, ("gpt2",), ("zero", "split")),
    "no softmax correction": (
        "score_scale",
        lambda model, size, room: 1.0,
        ("gpt2",),
        ("zero", "split"),
    ),
    "units and heads used twice in full": ("Places", unshared, ("gpt2", "llama"), ("split",)),
    "heads used twice in full": ("_heads", lambda spec: set(), ("gpt2", "llama"), ("split",)),
}


@pytest.mark.parametrize(
    ("mistake", "name", "units"),
    [
        (mistake, name, units)
        for mistake, (*_, names, kinds) in MISTAKES.items()
        for name in names
        for units in kinds
    ],
)
def test_mistakes_are_caught(monkeypatch, mistake, name, units):
    narrow, wide = pair(name, {"gpt2": "more and larger heads", "llama": "both"}[name])
    monkeypatch.setattr(module, *MISTAKES[mistake][:2])
    verdict = sm.verify(narrow, widen(narrow, wide, units=units), dtype=torch.float64)
    assert not verdict.same and verdict.difference > 1e-4


@pytest.mark.parametrize(
    "tensor",
    [
        "transformer.wte.weight",
        "transformer.h.1.attn.c_attn.weight",
        "transformer.h.0.mlp.c_proj.bias",
        "lm_head.weight",
    ],
)
def test_a_changed_tensor_is_caught(tensor):
    narrow, wide = pair("gpt2", "stream")
    widened = widen(narrow, wide)
    value = widened.weights[tensor]
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=value.dtype)
    assert sm.verify(narrow, with_tensor(widened, tensor, value), dtype=torch.float64).same
    assert not sm.verify(
        narrow, with_tensor(widened, tensor, value + 1e-6 * noise), dtype=torch.float64
    ).same


# stock checkpoints


@both_units
@pytest.mark.parametrize(("name", "label"), FAMILIES)
def test_transformers_loads_it_and_gives_the_same_logits(tmp_path, name, label, units):
    stock = small_model(name)
    stock.save_pretrained(tmp_path / "narrow")
    narrow, wide = (
        sm.load(tmp_path / "narrow"),
        loaded(name, 1, torch.float32, **WIDER[name][label]),
    )
    sm.save(widen(narrow, wide, units=units), tmp_path / "widened", gate=gate(narrow))
    again = getattr(transformers, narrow.spec.architecture).from_pretrained(
        tmp_path / "widened", local_files_only=True
    )
    sizes = {key: value for key, value in WIDER[name][label].items() if key != "head_dim"}
    assert all(getattr(again.config, key) == value for key, value in sizes.items())
    inputs = samples(narrow, 1)[0].inputs
    with torch.no_grad():
        expected, found = (model(**inputs).logits for model in (stock, again.eval()))
        other = small_model(name, seed=1)(**inputs).logits
    assert (found - expected).norm() <= 1e-5 * expected.norm() < (other - expected).norm()
    record = json.loads((tmp_path / "widened" / "symmerge.json").read_text())
    assert record["verified"]["same"] and record["steps"][-1]["step"] == "widen"
    assert "Relative difference of the logits" in (tmp_path / "widened" / "README.md").read_text()


def test_the_gate_refuses_a_widened_model_that_computes_something_else(tmp_path, monkeypatch):
    narrow, wide = pair("gpt2", "stream", torch.float32)
    monkeypatch.setattr(module, "stretch", lambda size, room: 1.0)
    with pytest.raises(FunctionChanged, match="nothing was written"):
        sm.save(widen(narrow, wide), tmp_path / "widened", gate=gate(narrow))
    assert not (tmp_path / "widened").exists()


def test_the_record_says_what_was_done_and_the_config_keeps_the_precision(tmp_path):
    for seed, dtype, changes in (
        (0, torch.bfloat16, {}),
        (1, torch.float32, {"n_embd": 72, "n_head": 6}),
    ):
        small_model("gpt2", seed=seed, dtype=dtype, **changes).save_pretrained(tmp_path / str(seed))
    narrow, wide = (sm.load(tmp_path / str(seed)) for seed in range(2))
    widened = widen(narrow, wide)
    step = widened.history[-1]
    assert step.step == "widen" and "residual 48 -> 72, head 4 -> 6" in step.what
    assert (
        widened.dtype == torch.bfloat16
        and widened.config["dtype"] == "bfloat16" != wide.config["dtype"]
    )
    assert widened.config["n_embd"] == 72 and not widened.config["tie_word_embeddings"]


# matching


# the rotary part of a dead head has no evidence at all, and `nearest_invertible` stumbles over it
PLANTED = [(name, label, units) for name, label in FAMILIES for units in ("zero", "split")]


@pytest.mark.parametrize(("name", "label", "units"), PLANTED)
def test_a_planted_symmetry_is_recovered(name, label, units):
    narrow, wide = pair(name, label)
    widened = widen(narrow, wide, units=units)
    planted = random_member(widened, seed=5)[1]
    found = sm.align(planted, widened, RECIPES["weights-only"])
    assert found.before > 1 and found.after <= 1e-6
    assert difference(sm.average(found.reference, found.aligned), narrow) <= 1e-6
    assert (
        difference(sm.average(planted, widened), narrow) >= 1e-1
    )  # the control: averaged as they are


def test_a_widened_model_merges_with_the_wide_one_in_its_architecture(tmp_path):
    narrow, wide = pair("vit", "all", torch.float32)
    found = sm.align(wide, widen(narrow, wide, units="split"), RECIPES["weights-only"])
    assert (
        sm.verify(wide, found.reference).same
        and sm.verify(narrow, found.aligned).same
        and found.after < found.before
    )
    sm.save(sm.average(found.reference, found.aligned), tmp_path / "merged")
    merged = transformers.ViTForImageClassification.from_pretrained(
        tmp_path / "merged", local_files_only=True
    )
    assert merged.config.hidden_size == 80 and merged.config.intermediate_size == 130


# refusals

UNLIKE = {
    "class": ("gpt2", "llama", {}, ["class GPT2LMHeadModel / LlamaForCausalLM"]),
    "depth": (
        "gpt2",
        "gpt2",
        {"n_embd": 60, "n_layer": 3},
        ["n_layer 2 / 3", "only widths may differ"],
    ),
    "positions": ("gpt2", "gpt2", {"n_positions": 32}, ["n_positions 64 / 32"]),
    "rotary positions": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}},
        ["rope_parameters", "9000.0"],
    ),
    "frequencies": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}},
        ["rope_parameters", "50000.0"],
    ),
    "vocabulary": ("llama", "llama", {"vocab_size": 103}, ["vocab_size 101 / 103"]),
    "labels": ("vit", "vit", {"num_labels": 7}, ["labels 5 / 7"]),
    "image": ("vit", "vit", {"image_size": 32}, ["image_size 16 / 32"]),
    "patch": ("vit", "vit", {"patch_size": 8}, ["patch_size 4 / 8"]),
    "activation": ("vit", "vit", {"hidden_act": "relu"}, ["hidden_act gelu / relu"]),
    "epsilon": ("gpt2", "gpt2", {"layer_norm_epsilon": 1e-6}, ["layer_norm_epsilon 1e-05 / 1e-06"]),
    "biases": ("vit", "vit", {"qkv_bias": False}, ["qkv_bias True / False"]),
    "residual": (
        "neox",
        "neox",
        {"use_parallel_residual": False},
        ["use_parallel_residual True / False"],
    ),
    "window": ("mistral", "mistral", {"sliding_window": 4}, ["sliding_window 8 / 4"]),
    "rotary head size": (
        "llama",
        "llama",
        {"head_dim": 16},
        ["heads of 12 / 16 coordinates", "rotary frequencies", "heads of the same size"],
    ),
    "normed head size": (
        "qwen3",
        "qwen3",
        {"head_dim": 20},
        ["heads of 8 / 10 rotary pairs", "heads of the same size"],
    ),
    "partial rotary head size": (
        "neox",
        "neox",
        {"hidden_size": 96},
        ["heads of 12 / 24 coordinates"],
    ),
    "wider": (
        "gpt2",
        "gpt2",
        {"n_embd": 24, "n_inner": 64},
        ["narrower in: residual 48 / 24, qk 12 / 6, vo 12 / 6, ff 96 / 64", "swap the two"],
    ),
    "wider in one": (
        "gpt2",
        "gpt2",
        {"n_embd": 60, "n_inner": 64},
        ["narrower in: ff 96 / 64", "at least as wide in everything"],
    ),
    "fewer heads": ("gpt2", "gpt2", {"n_embd": 96, "n_head": 3}, ["narrower in: head 4 / 3"]),
    "queries": (
        "llama",
        "llama",
        {"num_key_value_heads": 4},
        ["narrower in: query 2 / 1", "query heads per key"],
    ),
    "post-norm, rotary": (
        "roformer",
        "roformer",
        {"intermediate_size": 130},
        ["norms of roformer sit on the stream itself"],
    ),
    "normed transform": (
        "modernbert",
        "modernbert",
        {"hidden_size": 72, "num_attention_heads": 6},
        [
            "'transform' (48 / 72) is normalised right after an activation",
            "only differs in its feed-forward units",
        ],
    ),
    "post-norm": (
        "bert",
        "bert",
        {"hidden_size": 60},
        ["norms of bert sit on the stream itself", "only models whose stream rotates"],
    ),
}


@pytest.mark.parametrize("label", UNLIKE)
def test_what_is_unlike_is_refused_with_a_remedy(label):
    name, other, changes, words = UNLIKE[label]
    with pytest.raises(MismatchError, match="cannot be widened to") as caught:
        widen(loaded(name), sm.load(small_model(other, seed=1, dtype=torch.float64, **changes)))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_wide_model_that_stays_tied_is_refused_until_untied():
    narrow, wide = pair("gpt2", "stream")
    plain = with_tensor(
        wide, "transformer.ln_f.weight", torch.full((60,), 0.7, dtype=torch.float64)
    )
    plain = with_tensor(plain, "transformer.ln_f.bias", torch.zeros(60, dtype=torch.float64))
    with pytest.raises(MismatchError, match="untie it first"):
        widen(narrow, plain)
    assert difference(widen(narrow, sm.canonicalize(plain, ("untie",))), narrow) <= EXACT


def test_settings_of_training_may_differ():
    narrow, wide = (
        loaded("gpt2"),
        loaded(
            "gpt2",
            1,
            n_embd=60,
            resid_pdrop=0.3,
            initializer_range=0.5,
            eos_token_id=3,
            use_cache=False,
        ),
    )
    narrow = replace(
        narrow, config={**narrow.config, "n_ctx": 1024}
    )  # of older releases: today's class does not know it
    assert difference(widen(narrow, wide), narrow) <= EXACT


def test_a_restricted_stream_and_unknown_units_are_refused():
    narrow, wide = pair("gpt2", "stream")
    with pytest.raises(MismatchError, match="restrict them afterwards"):
        widen(narrow.restrict(residual="permutation"), wide)
    with pytest.raises(MismatchError, match="units mirrored: choose one of zero, split"):
        inspect.unwrap(widen)(narrow, wide, units="mirrored")


# verify


def test_models_of_other_widths_are_compared_and_found_different():
    narrow, wide = pair("gpt2", "stream")
    verdict = sm.verify(narrow, wide, dtype=torch.float64)
    assert not verdict.same and verdict.difference > 1e-2
