"""A wrong B is seen, wherever it differs: each of these passed for the same before."""

import json
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from differences import difference
from torch import Tensor

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.lab.small_models import SMALL, small_model
from symmerge.models.canonical.form import canonicalize
from symmerge.models.model import Model
from symmerge.models.orbit import random_member
from symmerge.models.saving import save

Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def pair(tmp_path):
    """A model, and the same with some parameters or settings changed, both from disk."""

    def make(
        name: str,
        change: Change = lambda tensors: None,
        *,
        both: Change = lambda tensors: None,
        dtype: torch.dtype = torch.float32,
        settings: dict[str, object] | None = None,
        **config: object,
    ) -> tuple[Model, Model]:
        for folder, changes in (("a", (both,)), ("b", (both, change))):
            model = small_model(name, seed=1, dtype=dtype, **config)
            with torch.no_grad():
                for apply in changes:
                    apply(dict(model.named_parameters()))
            model.save_pretrained(tmp_path / folder)
        file = tmp_path / "b" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **(settings or {})}))
        return sm.load(tmp_path / "a"), sm.load(tmp_path / "b")

    return make


def scaled(name: str, rows: object, by: float) -> Change:
    return lambda tensors: tensors[name][rows].mul_(by)


def test_the_same_model_is_the_same(pair):
    for name in ("gpt2", "bert"):
        verdict = sm.verify(*pair(name))
        assert verdict.same and verdict.difference == 0 and verdict.units == 0
        assert "all 101 tokens" in verdict.inputs and "all 64 positions" in verdict.inputs


@pytest.mark.parametrize("token", [0, 57, 100])
@pytest.mark.parametrize("by", [1.01, -1])
def test_every_vocabulary_row_is_reached(pair, token, by):
    change = scaled("transformer.wte.weight", slice(token, token + 1), by)
    verdict = sm.verify(*pair("gpt2", change, tie_word_embeddings=False))
    assert not verdict.same and verdict.units > 100 and "tokens" in verdict.where


def test_a_row_of_a_large_vocabulary_is_reached(pair):
    change = scaled("transformer.wte.weight", slice(19_998, 19_999), 1.01)
    verdict = sm.verify(*pair("gpt2", change, vocab_size=20_000, tie_word_embeddings=False))
    assert not verdict.same and "row 19998" in verdict.where


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gpt2", "transformer.wpe.weight"),
        ("bert", "bert.embeddings.position_embeddings.weight"),
        ("bert-classifier", "bert.embeddings.position_embeddings.weight"),
        ("roberta", "roberta.embeddings.position_embeddings.weight"),
    ],
)
def test_the_last_position_is_reached(pair, name, tensor):
    assert not sm.verify(*pair(name, scaled(tensor, slice(63, 64), 1.1))).same


@pytest.mark.parametrize("name", ["bert", "bert-classifier", "roformer"])
def test_every_token_type_is_reached(pair, name):
    tensor = f"{name.partition('-')[0]}.embeddings.token_type_embeddings.weight"
    assert not sm.verify(*pair(name, scaled(tensor, slice(1, 2), 1.1))).same


def test_a_second_output_that_is_not_finite_is_no_proof(pair, monkeypatch):
    import symmerge.verification.verdict as module

    a, b = pair("bert-pretraining")
    assert sm.verify(a, b).same
    right = module.logits_of

    def with_nan(model, *args, **options):
        logits = right(model, *args, **options)
        if model.where == b.where:
            logits["seq_relationship_logits"][:] = float("nan")
        return logits

    monkeypatch.setattr(module, "logits_of", with_nan)
    assert not sm.verify(a, b).same


def huge_bias(tensors: dict[str, Tensor]) -> None:
    tensors["cls.predictions.bias"][5] = -1e6


def test_a_huge_logit_does_not_hide_the_others(pair):
    change = scaled("bert.encoder.layer.1.output.dense.weight", ..., 0.0)
    a, b = pair("bert", change, both=huge_bias)
    assert not sm.verify(a, b).same
    assert sm.verify(a, random_member(a, 1)[1]).same  # the control


def noise(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        factor = 1 + 0.005 * torch.randn(tensor.shape, generator=generator)
        tensor.copy_((tensor.float() * factor).to(tensor))


COARSE = {
    "half a percent of noise": ("gpt2", noise),
    "half a percent of noise in Llama": ("llama", noise),
    "half a percent of noise in BERT": ("bert", noise),
    "a value head": ("llama", scaled("model.layers.0.self_attn.v_proj.weight", slice(12), 0.9)),
    "fifteen rows of the head": ("gpt2-untied", scaled("lm_head.weight", slice(15), 0.0)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", COARSE)
def test_coarse_weights_are_no_excuse(pair, name, dtype):
    model, change = COARSE[name]
    assert not sm.verify(*pair(model, change, dtype=dtype)).same


def test_one_coarse_tensor_excuses_itself_alone(pair):
    """One norm in bfloat16 and all else in float32: half a percent elsewhere is seen."""

    def coarse_norm(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.input_layernorm.weight"].data = tensors[
            "model.layers.0.input_layernorm.weight"
        ].bfloat16()

    change = scaled("model.layers.1.mlp.down_proj.weight", ..., 1.02)
    a, b = pair("llama", change, both=coarse_norm)
    assert a.dtype == torch.bfloat16 and not sm.verify(a, b).same
    assert sm.verify(a, random_member(a, 1)[1]).same  # the control


SETTINGS = {
    "sliding window": ("mistral", {"sliding_window": 7}),
    "no window": ("mistral", {"sliding_window": None}),
    "a window longer than the inputs": ("mistral", {"sliding_window": 8000}),
    "local attention": ("modernbert", {"local_attention": 20}),
    "rope base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}}),
    "rope scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "epsilon": ("llama", {"rms_norm_eps": 1e-5}),
    "which its config does not declare": ("deberta-v2-classifier", {"conv_act": "relu"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_part_of_the_function(pair, name):
    model, settings = SETTINGS[name]
    verdict = sm.verify(*pair(model, settings=settings))
    assert not verdict.same and verdict.settings


def test_settings_of_training_do_not_matter(pair):
    settings = {"attention_dropout": 0.3, "use_cache": False, "initializer_range": 0.5}
    assert sm.verify(*pair("llama", settings=settings)).same


def test_windows_are_seen_by_the_runs_themselves(pair):
    """The inputs are longer than the window, whatever the config says."""
    verdict = sm.verify(*pair("mistral", settings={"sliding_window": 40}))
    assert verdict.units > 100


# what is the same stays the same, in every precision


# Every family in float32, and every third in a half precision: test_checkpoint.py has the others.
IN_TURN = zip([*SMALL][2::3], cycle((torch.bfloat16, torch.float16)), strict=False)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in SMALL), *IN_TURN])
def test_members_of_the_orbit_pass(name, dtype, tmp_path):
    source = sm.load(small_model(name, seed=4, dtype=dtype))
    for number, moved in enumerate((random_member(source, 5)[1], canonicalize(source))):
        written = sm.load(save(moved, tmp_path / str(number)))
        verdict = sm.verify(source, written)
        assert verdict.same, verdict


@pytest.mark.parametrize("name", ["gpt2", "bert-pretraining", "vit", "mixtral"])
def test_the_tests_measure_what_a_verdict_says(name):
    first, second = (sm.load(small_model(name, seed=seed, dtype=torch.float64)) for seed in (0, 1))
    verdict = sm.verify(first, second, dtype=torch.float64)
    assert difference(first, second) == pytest.approx(verdict.difference, rel=1e-12)
    assert verdict.difference > 1e-2 and difference(first, first) == 0


def test_a_tolerance_replaces_the_measure(pair):
    a, b = pair("gpt2", noise)
    assert sm.verify(a, b, tolerance=0.5).same and not sm.verify(a, b, tolerance=1e-6).same


def test_the_length_of_a_row_is_seen(pair):
    """The last norm would hide it, were it to follow the embedding at once."""
    change = scaled("model.embed_tokens.weight", slice(4000, 4001), 1.1)
    verdict = sm.verify(*pair("llama", change, vocab_size=4096))
    assert not verdict.same and "row 4000" in verdict.where


def test_outputs_that_mean_different_things_are_not_compared():
    """Class scores in one, features in the other: a setting decides how the output is read."""
    scores = sm.load(small_model("dinov3-classifier"))
    features = sm.load(small_model("dinov3-classifier", problem_type=None))
    assert sm.verify(scores, scores).same
    with pytest.raises(MismatchError, match="differ in: task image-classification"):
        sm.verify(scores, features)
