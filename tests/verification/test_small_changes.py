"""One unit, one bias or one name of a class is changed, in every precision: `verify` sees it."""

import copy
import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.lab.small_models import small_model
from symmerge.models.canonical.form import canonicalize
from symmerge.models.saving import save

# Names of tensors that change nothing: a softmax ignores a constant in all of its scores.
KEY_BIASES = ("k_proj.bias", "key.bias")


def with_one_change(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model with one row (or one number) of one tensor times 1.1, for many tensors."""
    for name, before in model.named_parameters():
        if ".0." in name or name.endswith(KEY_BIASES):
            continue
        changed = copy.deepcopy(model)
        row = 3 if before.shape[0] > 3 else 0
        after = dict(changed.named_parameters())[name]
        with torch.no_grad():
            after[row] = (1.1 * after[row].float()).to(after)
        yield name, changed


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", torch.bfloat16),
        ("vit", torch.bfloat16),
        ("bert", torch.bfloat16),
        ("llama", torch.float16),
        ("modernbert", torch.float16),
    ],
)
def test_one_row_is_seen_in_coarse_weights(name, dtype):
    """The other weights are stored alike in both: their rounding excuses nothing."""
    model = small_model(name, seed=1, dtype=dtype)
    source, seen, passed = sm.load(model), 0, []
    for tensor, changed in with_one_change(model):
        seen += 1
        if sm.verify(source, sm.load(changed)).same:
            passed.append(tensor)
    assert seen >= 10 and not passed, passed


@pytest.mark.parametrize("name", ["bert-classifier", "roberta-classifier", "vit"])
def test_noise_is_seen_in_few_outputs(name, tmp_path):
    """Half a percent in bfloat16, three times what rounding does; and no more than rounding."""
    for seed in range(3):
        model = small_model(name, seed=seed, dtype=torch.bfloat16)
        source, noisy = sm.load(model), copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in noisy.parameters():
                factor = 1 + 0.005 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_((parameter.float() * factor).to(parameter))
        assert not sm.verify(source, sm.load(noisy)).same
        right = sm.load(save(canonicalize(source), tmp_path / str(seed)))  # the control
        assert sm.verify(source, right).same


@pytest.fixture
def with_settings(tmp_path):
    """A model, and the same with other settings."""

    def make(name: str, settings: dict[str, object]):
        for folder, added in (("a", {}), ("b", settings)):
            small_model(name, seed=1).save_pretrained(tmp_path / folder)
            file = tmp_path / folder / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **added}))
        return sm.load(tmp_path / "a"), sm.load(tmp_path / "b")

    return make


SWAPPED = {str(at): f"LABEL_{at}" for at in (1, 0, 2, 3, 4)} | {"0": "LABEL_1", "1": "LABEL_0"}
RENAMED = {str(at): f"animal {at}" for at in range(5)}


@pytest.mark.parametrize(
    ("name", "settings", "same"),
    [
        ("vit", {"id2label": SWAPPED}, False),
        ("vit", {"problem_type": "multi_label_classification"}, False),
        ("bert-classifier", {"problem_type": "regression"}, False),
        # what has no effect on the outputs
        ("vit", {"id2label": RENAMED}, True),
        ("vit", {"problem_type": "single_label_classification"}, True),
        ("bert", {"problem_type": "regression"}, True),
        ("llama", {"max_position_embeddings": 128}, True),
        ("modernbert", {"sparse_prediction": True, "deterministic_flash_attn": True}, True),
        ("dinov3", {"pos_embed_rescale": 1.0, "layerscale_value": 0.1}, True),
    ],
)
def test_settings_that_change_what_outputs_mean(name, settings, same, with_settings):
    verdict = sm.verify(*with_settings(name, settings))
    assert verdict.same is same and bool(verdict.settings) is not same


def test_a_longest_input_that_frequencies_depend_on_is_a_setting(with_settings):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic, longer = (
        with_settings("llama", {"rope_parameters": rope, "max_position_embeddings": most})[1]
        for most in (64, 128)
    )
    assert any("max_position" in setting for setting in sm.verify(dynamic, longer).settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit", {"image_size": 17}),  # as many patches
        ("roberta", {"pad_token_id": 2}),  # as many positions, of which fewer are reached
        ("roberta-classifier", {"pad_token_id": 0}),
    ],
)
def test_models_with_other_inputs_are_not_run(name, settings, with_settings):
    with pytest.raises(MismatchError, match="differ in: inputs"):
        sm.verify(*with_settings(name, settings))
