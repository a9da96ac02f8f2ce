"""OPT: positions with an offset, and settings that have no table."""

import pytest
import torch
from differences import difference
from negative_controls import left_behind, loaded
from safetensors.torch import load_file, save_file

import symmerge as sm
from symmerge.errors import UnsupportedModel
from symmerge.evaluation.tasks.preprocessing import max_length
from symmerge.lab.small_models import small_model
from symmerge.models.orbit import random_member
from symmerge.verification.inputs import samples


@pytest.mark.parametrize(
    "changes",
    [
        {"word_embed_proj_dim": 32},
        {"layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
    ],
    ids=str,
)
def test_settings_without_a_table_are_refused(changes):
    (setting,) = changes
    with pytest.raises(UnsupportedModel, match=f"in memory: opt: .*{setting}"):
        sm.load(small_model("opt", **changes))


def test_positions_begin_at_the_third_row():
    model = loaded("opt")
    assert (model.spec.sizes["position"], model.spec.reserved_positions) == (66, 2)
    assert max_length(model) == 64
    longest = max(sample.inputs["input_ids"].shape[1] for sample in samples(model, 0))
    assert longest == 64
    with torch.no_grad():
        small_model("opt")(torch.ones(1, 64, dtype=torch.int64))
        with pytest.raises(IndexError):  # the control: there is no further row
            small_model("opt")(torch.ones(1, 65, dtype=torch.int64))


@pytest.mark.parametrize(
    "changes",
    [{"enable_bias": False}, {"activation_function": "gelu"}, {"tie_word_embeddings": False}],
    ids=str,
)
@pytest.mark.parametrize("name", ["opt", "opt-post-norm"])
def test_every_variant_moves_and_computes_the_same(name, changes):
    model = sm.load(small_model(name, dtype=torch.float64, **changes))
    for other in (random_member(model, 1)[1], sm.canonicalize(model)):
        assert difference(model, other) <= 1e-10
    wrong = left_behind("model.decoder.layers.0.fc2.weight").forbidden(
        sm.canonicalize(model, ("fold",))
    )
    assert difference(model, wrong) > 1e-2  # the control


def test_names_without_a_prefix_are_read(tmp_path):
    small_model("opt").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    assert short.keys() != stored.keys()
    save_file(short, tmp_path / "model.safetensors", {"format": "pt"})
    assert sm.verify(sm.load(tmp_path), sm.load(small_model("opt"))).same
