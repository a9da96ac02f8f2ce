"""DINOv3 as a classifier: a stock class without a head, whose first coordinates are scores."""

import json
from dataclasses import replace

import pytest
import torch
from differences import difference

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import MismatchError, SymmetryError, UnsupportedModel
from symmerge.lab.small_models import small_model
from symmerge.lab.training.embedded import EMBEDDED
from symmerge.lab.training.loop import train
from symmerge.lab.training.recipes import with_changes
from symmerge.models.alignment import Alignment
from symmerge.models.orbit import random_member
from symmerge.symmetry.groups import OrthogonalFixingOnes, Trivial
from symmerge.symmetry.notation import unparse
from symmerge.verification.inputs import samples
from symmerge.verification.modules import full_module, logits_of

NAME = "dinov3-classifier"
BIASES = ("query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias")


def load(name=NAME, **changes):
    return sm.load(small_model(name, dtype=torch.float64, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_gated_mlp": False},
        {"num_register_tokens": 0},
        {"patch_size": (4, 8)},
        dict.fromkeys(BIASES, True),
        dict.fromkeys(BIASES, False),
        {"hidden_act": "relu", "use_gated_mlp": False},
    ],
    ids=str,
)
def test_every_variant_moves_and_computes_the_same(changes):
    model = load(**changes)
    for other in (
        random_member(model, 1)[1],
        random_member(sm.canonicalize(model), 2)[1],
        random_member(model.restrict(residual="permutation"), 3)[1],
    ):
        assert difference(model, other) <= 1e-10
        token, moved = (m.weights["embeddings.cls_token"] for m in (model, other))
        assert not torch.allclose(moved, token, atol=0.1)


def test_scores_are_the_first_coordinates_of_the_pooled_output():
    module = small_model(NAME)
    model = sm.load(module)
    sample = samples(model, 0)[0]
    inputs = sample.inputs
    pooled = module(**inputs).pooler_output
    logits = full_module(model, torch.float32)(**inputs).logits
    assert torch.allclose(logits, pooled[:, :5], atol=1e-6)
    assert logits_of(model, sample)["logits"].shape == (len(pooled), 5)
    features = sm.load(small_model("dinov3"))
    assert logits_of(features, sample)["logits"].shape == (len(pooled), 48)


def test_only_a_config_that_says_so_makes_a_classifier():
    # Every config has two labels by default, also that of a plain feature extractor.
    for changes in (
        {"problem_type": None},
        {"problem_type": "regression"},
        {"problem_type": None, "num_labels": 2},
    ):
        features = load(**changes).spec
        assert (features.task, features.pooled) == ("image-features", 48)
        assert features.spaces["residual"].group == Trivial(48) and "label" not in features.spaces
        assert unparse(features.tensors["norm.weight"]) == "residual~"
        assert not features.norms and not features.scales
    table = load().spec
    assert (table.task, table.pooled) == ("image-classification", 5)
    assert (table.sizes["label"], table.stream) == (5, "residual")
    assert unparse(table.tensors["norm.weight"]) == "(label~ + residual~)"
    assert table.spaces["residual"].group == OrthogonalFixingOnes(43)
    assert table.fingerprint != load(num_labels=6).spec.fingerprint


def test_features_are_compared_with_their_mean():
    """A softmax ignores a constant; readers of features do not."""
    for name, shows in (("dinov3", True), (NAME, False)):
        model = load(name)
        shifted = DerivedWeights(
            model.weights, {"norm.bias": lambda model=model: model.weights["norm.bias"] + 1}
        )
        assert (difference(model, replace(model, weights=shifted)) > 1e-2) is shows


def test_an_element_for_all_of_the_stream_is_refused():
    spec = sm.canonicalize(load()).spec
    identity = Alignment.identity(spec)
    too_large = OrthogonalFixingOnes(48).random(torch.Generator().manual_seed(0))
    with pytest.raises(SymmetryError, match=r"'residual'.*expects.*43, 43.*48, 48"):
        replace(identity, elements={**identity.elements, "residual": too_large}).check()


def test_what_cannot_be_done_is_refused():
    with pytest.raises(MismatchError, match=r"no task measures.*single_label_classification"):
        sm.make_task("image", "digits", [sm.load(small_model("dinov3"))])
    with pytest.raises(UnsupportedModel, match="47 classes in a stream of 48"):
        load(num_labels=47)
    with pytest.raises(MismatchError, match=r"cannot be widened.*coordinates of the stream of"):
        sm.widen(load(), load(hidden_size=96, num_attention_heads=8))


def test_names_of_either_age_are_read(tmp_path):
    module = small_model(NAME)
    module.save_pretrained(tmp_path / "stock")
    stock = sm.load(tmp_path / "stock")
    assert "layer.0.norm1.weight" in sm.load(tmp_path / "stock").stored_as.values()
    assert sm.verify(stock, sm.load(module)).difference == 0
    back = type(module).from_pretrained(sm.save(random_member(stock, 1)[1], tmp_path / "member"))
    inputs = samples(stock, 0)[0].inputs
    scores, expected = (m(**inputs).pooler_output[:, :5] for m in (back, module))
    assert torch.allclose(scores, expected, atol=1e-4)


def test_a_trained_one_says_that_it_classifies(tmp_path):
    recipe = with_changes(
        EMBEDDED["dinov3-digits"],
        config={"hidden_size": 32, "intermediate_size": 32},
        schedule={"steps": 120, "batch_size": 32},
    )
    folders = [train(recipe, seed, tmp_path / str(seed)) for seed in range(2)]
    config = json.loads((folders[0] / "config.json").read_text())
    assert config["problem_type"] == "single_label_classification" and len(config["id2label"]) == 10
    assert json.loads((folders[0] / "metrics.json").read_text())["held_out"]["accuracy"] > 0.5
    a, b = map(sm.load, folders)
    result = sm.align(a, b)
    assert sm.verify(b, result.aligned).same
    task = sm.make_task("image", "digits", [a, b])
    before = sm.barrier(a, b, task, points=3)
    after = sm.barrier(result.reference, result.aligned, task, points=3)
    assert after.barrier_mean < before.barrier_mean
