"""Models of several stacks: what their function is, and whether all of it is looked at."""

from functools import cache

import pytest
import torch
from fixtures import checkpoint

import symmerge as sm
from symmerge.checkpoints.files import read_json, write_json
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import MismatchError, UnsupportedModel
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import small_model
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.efforts import effort_recipe
from symmerge.matching.sweeps import Sweeps
from symmerge.matching.weights import WeightMatching
from symmerge.models.orbit import random_member
from symmerge.symmetry.groups import Orthogonal, Trivial
from symmerge.verification.inputs import samples
from symmerge.verification.modules import full_module


@cache
def load(name, **changes):
    return sm.load(small_model(name, dtype=torch.float64, **changes))


def edited(model, tensor, change):
    """The model with a tensor changed in place, and no record of why."""

    def computed():
        value = model.weights[tensor].clone()
        change(value)
        return value

    weights = DerivedWeights(model.weights, {tensor: computed})
    return model.derive(weights, step=HistoryStep("edit", tensor))


# the function is what a class answers


@torch.no_grad()
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_scores_stay_and_embeddings_rotate(name):
    model = load(name)
    answers = []
    for one in (model, random_member(model, 1)[1]):
        module = full_module(one, torch.float64)
        module._forward_hooks.clear()  # all that the stock class returns
        sample = samples(model, 1)[0]
        answers.append(module(**{key: _wide(value) for key, value in sample.inputs.items()}))
    before, after = answers
    assert (before.logits_per_image - after.logits_per_image).abs().max() <= 1e-10
    assert (before.text_embeds - after.text_embeds).norm() > 0.1
    products = [each.text_embeds @ each.image_embeds.T for each in answers]
    assert (products[0] - products[1]).abs().max() <= 1e-10


def _wide(value):
    return value.double() if value.is_floating_point() else value


def test_the_joint_space_is_shown_by_a_tower_alone():
    assert load("clip").spec.spaces["joint"].group == Orthogonal(40)
    assert load("clip_text_model").spec.spaces["joint"].group == Trivial(40)
    assert load("clip_vision_model").spec.spaces["joint"].group == Trivial(40)


def test_embeddings_can_be_kept():
    kept = load("clip").restrict(joint="identity")
    moved = random_member(kept, 1)[1]
    rows = [torch.linalg.svdvals(each.weights["text_projection.weight"]) for each in (kept, moved)]
    assert sm.verify(kept, moved, dtype=torch.float64).difference <= 1e-10
    assert not torch.allclose(*rows)  # the stream turned
    assert "joint" not in moved.moved.alignment.elements


# the pooling head


def test_the_probe_becomes_a_bias():
    model = load("siglip")
    folded = sm.canonicalize(model, ("fold",))
    head = "vision_model.head.attention.in_proj_"
    assert not folded.weights["vision_model.head.probe"].any()
    assert not folded.weights[f"{head}weight"][:48].any()
    assert (folded.weights["vision_model.post_layernorm.weight"] == 1).all()
    queries = model.weights[f"{head}weight"][:48] @ model.weights["vision_model.head.probe"][0, 0]
    expected = queries + model.weights[f"{head}bias"][:48]
    assert torch.allclose(folded.weights[f"{head}bias"][:48], expected, atol=1e-12)
    lost = edited(folded, f"{head}bias", lambda bias: bias[:48].zero_())
    assert sm.verify(folded, lost, dtype=torch.float64).difference >= 1e-2  # the control


def test_centring_alone_absorbs_the_probe_too():
    model = load("siglip")
    centred = sm.canonicalize(model, ("fold", "centre"))
    assert sm.verify(model, centred, dtype=torch.float64).difference <= 1e-10
    # scores compare vectors whose mean counts
    joint = "vision_model.head.mlp.fc2.weight"
    assert centred.weights[joint].mean(0).abs().max() > 1e-3
    without = edited(centred, joint, lambda weight: weight.sub_(weight.mean(0)))
    assert sm.verify(centred, without, dtype=torch.float64).difference >= 1e-2


def test_spaces_that_wait_for_each_other_are_matched_again():
    first, second = load("siglip"), random_member(load("siglip"), 1)[1]
    found = sm.align(first, second, sm.AlignOptions(effort="fast"))
    assert len(found.solution.changes) > 1  # more than one sweep
    for name in found.reference.weights:
        apart = found.reference.weights[name] - found.aligned.weights[name]
        assert apart.norm() <= 1e-5 * found.reference.weights[name].norm(), name
    assert not hubs("vit") and set(hubs("siglip")) == {"joint", "units.pool"}


def hubs(name):
    from symmerge.matching.evidence import Evidence, Weighting
    from symmerge.matching.heads import HeadOptions

    model = sm.canonicalize(load(name))
    sides = (model.weights, model.weights)
    evidence = Evidence(table=model.spec, weights=sides, weighting=Weighting())
    return Sweeps(evidence, heads=HeadOptions())._hubs


# every row, position and output of both towers is looked at

PLACES = {
    "clip": (
        "text_model.embeddings.token_embedding.weight",
        "text_model.embeddings.position_embedding.weight",
        "vision_model.embeddings.position_embedding.weight",
    ),
    "vit_mae": ("vit.embeddings.position_embeddings", "decoder.decoder_pos_embed"),
}


@pytest.mark.parametrize(
    ("name", "tensor"), [(name, tensor) for name, tensors in PLACES.items() for tensor in tensors]
)
@pytest.mark.parametrize("row", [3, -1])
def test_one_row_that_differs_is_seen(name, tensor, row):
    model = sm.load(small_model(name))

    def change(table):
        rows = table[0] if table.ndim == 3 else table
        rows[row] *= 1.5

    assert not sm.verify(model, edited(model, tensor, change)).same


def test_texts_end_where_the_class_reads_them():
    # an old config says 2, and the class takes the highest number
    for name, end in (("clip", 100), ("clip_text_model", 100)):
        ids = samples(load(name), 0)[0].inputs["input_ids"]
        assert (ids[:, -1] == end).all() and not (ids[:, :-1] == end).any()


def test_another_end_is_another_function():
    first, second = load("clip_text_model"), load("clip_text_model", eos_token_id=50)
    verdict = sm.verify(first, second)
    assert not verdict.same and any("end_token" in one for one in verdict.settings)


def test_hidden_patches_are_the_same_for_both_models():
    (sample,) = samples(load("vit_mae"), 0)
    assert sample.inputs["noise"].shape == (len(sample.inputs["pixel_values"]), 16)
    assert load("vit_mae").spec.noise == 16 and load("vit").spec.noise == 0


# what a user meets


def test_layers_that_a_tower_has_not_are_refused(tmp_path):
    folder = checkpoint(tmp_path / "model", "clip")
    config = read_json(folder / "config.json")
    config["text_config"]["num_hidden_layers"] = 10**6
    write_json(folder / "config.json", config)
    with pytest.raises(UnsupportedModel, match="num_hidden_layers 1000000"):
        sm.load(folder)


def test_images_with_labels_have_no_texts():
    with pytest.raises(MismatchError, match="scores images for texts, and digits has no texts"):
        make_task("image", "digits", [load("clip")])
    task = make_task("image", "self", [load("clip")], samples=4)
    (batch,) = task.batches
    assert batch["input_ids"].shape[0] == 64 and batch["pixel_values"].shape == (4, 3, 16, 16)


def test_learning_starts_from_what_flows_where_a_stream_only_permutes():
    starts = {
        name: type(effort_recipe("standard", load(name)).matching.start)
        for name in ("clip", "vit", "siglip")
    }
    assert starts == {"clip": ActivationMatching, "vit": WeightMatching, "siglip": WeightMatching}
