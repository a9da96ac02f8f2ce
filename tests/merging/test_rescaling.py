"""REPAIR: spreads and means become the parents', and the checkpoint stays stock."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from fixtures import checkpoint

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks.base import split
from symmerge.lab.small_models import SMALL, small_model
from symmerge.merging.rescaling import MIN_SAMPLES, map_axes, norm_axes, repair
from symmerge.merging.spreads import measure_spreads, stages, token_weights
from symmerge.verification.modules import full_module

TASKS = {
    "gpt2": ("clm", "python-docs", {}),
    "llama": ("clm", "python-docs", {}),
    "bert": ("mlm", "python-docs", {}),
    "vit": ("image", "digits", {"num_labels": 10}),
}


def made(name, folder):
    """Two models that were never matched, so that a merge loses much, and a task for both."""
    kind, data, changes = TASKS[name]
    models = [
        sm.load(checkpoint(folder / str(seed), name, seed=seed, **changes)) for seed in (0, 1)
    ]
    return *models, sm.make_task(kind, data, models, samples=16)


@pytest.fixture(scope="module", params=TASKS)
def pair(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return made("gpt2", tmp_path_factory.mktemp("text"))


def names(model, part="maps"):
    return list(
        (map_axes if part == "maps" else norm_axes)(model.spec, full_module(model, torch.float32))
    )


def spreads(model, part, task):
    return measure_spreads(
        full_module(model, torch.float32), names(model, part), split(task, 0.25)[0]
    )


@pytest.mark.parametrize("part", ["maps", "norms"])
def test_deviations_and_means_become_the_parents(pair, part):
    a, b, task = pair
    merged = sm.average(a, b, 0.25)
    found = repair(merged, [a, b], task, shares=(0.75, 0.25), part=part)
    before, after, *parents = (spreads(model, part, task) for model in (merged, found.model, a, b))
    for name in before:
        goal = 0.75 * parents[0][name].deviation + 0.25 * parents[1][name].deviation
        assert torch.allclose(after[name].deviation, goal, rtol=1e-3), name
        if f"{name}.bias" in merged.weights:
            goal = 0.75 * parents[0][name].mean + 0.25 * parents[1][name].mean
            assert torch.allclose(after[name].mean, goal, atol=1e-3), name
    apart = [(after[name].deviation / before[name].deviation).log().abs().mean() for name in before]
    assert min(apart[1:]) > 0.02 and max(apart) > 0.1  # the control: before, they were others
    assert found.coordinates + found.left_alone == sum(
        len(spread.mean) for spread in before.values()
    )
    assert found.before != found.after and found.largest_scale > 1.1


@pytest.mark.parametrize("part", ["maps", "norms"])
def test_a_merge_of_equals_is_left_as_it_is(pair, part):
    a, _, task = pair
    found = repair(sm.average(a, a), [a, a], task, part=part)
    assert found.median_scale == pytest.approx(
        1, abs=1e-6
    ) and found.largest_scale == pytest.approx(1, abs=1e-6)
    assert all(
        torch.allclose(found.model.weights[name], a.weights[name], atol=1e-6) for name in a.weights
    )
    assert found.before["loss"] == pytest.approx(found.after["loss"], abs=1e-5)


@pytest.mark.parametrize("part", ["maps", "norms"])
def test_only_what_is_named_changes_and_heads_never(text, part):
    a, b, task = text
    merged = sm.average(a, b)
    found = repair(merged, [a, b], task, part=part).model
    changed = {
        name.rpartition(".")[0]
        for name in merged.weights
        if not torch.equal(merged.weights[name], found.weights[name])
    }
    assert changed == set(names(merged, part))
    assert not changed & {"lm_head", "transformer.wte", "transformer.wpe"}


@pytest.mark.parametrize("name", SMALL)
def test_every_map_inside_is_found_whatever_may_move(name):
    """All linear modules but the heads; also where recipes restrict spaces to the identity."""
    model = sm.load(small_model(name))
    module = full_module(model, torch.float32)
    linear = {
        part
        for part, owner in module.named_modules()
        if isinstance(owner, torch.nn.Linear | transformers.pytorch_utils.Conv1D)
    }
    heads = {
        "lm_head",
        "decoder",
        "classifier",
        "classifier.out_proj",
        "cls.predictions.decoder",
        "cls.seq_relationship",
        "lm_head.decoder",
        "predictions.decoder",
        "score",
        "qa_outputs",
        "vocab_projector",
        "pooler.dense",  # of a class without a head: visible
    }
    if any(part.startswith(("classifier.", "lm_head.")) for part in linear):
        heads -= {"classifier", "lm_head"}
    assert map_axes(model.spec, module).keys() == linear - heads
    still = model.restrict(
        **dict.fromkeys({space.partition(".")[0] for space in model.spec.hidden}, "identity")
    )
    assert map_axes(still.spec, module) == map_axes(model.spec, module)
    assert len(norm_axes(model.spec, module)) == sum(
        "norm" in type(owner).__name__.lower() for owner in module.modules()
    )


def test_stages_follow_the_forward_pass(pair):
    a, _, task = pair
    module = full_module(a, torch.float32)
    in_order = stages(module, names(a), task)
    assert sorted(name for stage in in_order for name in stage) == sorted(names(a))
    # queries, keys and values read the same, as do the two branches of a gated layer
    assert [len(stage) for stage in in_order[:4]] == {
        "gpt2": [1, 1, 1, 1],
        "llama": [3, 1, 2, 1],
    }.get(a.spec.family, [3, 1, 1, 1])


def test_the_checkpoint_is_stock_and_says_what_was_done(text, tmp_path):
    a, b, task = text
    found = repair(sm.average(a, b), [a, b], task)
    sm.save(found.model, tmp_path / "m")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    held_out = split(task, 0.25)[1]
    assert held_out.evaluate(loaded)["loss"] == pytest.approx(found.after["loss"], rel=1e-4)
    assert held_out.evaluate(full_module(sm.average(a, b), torch.float32))["loss"] == pytest.approx(
        found.before["loss"], rel=1e-6
    )
    steps = json.loads((tmp_path / "m" / "symmerge.json").read_text())["steps"]
    assert [step["step"] for step in steps][-2:] == ["merge", "repair"] and steps[-1][
        "after"
    ] == found.record()["after"]
    card = (tmp_path / "m" / "README.md").read_text()
    assert (
        "**repair**" in card
        and "12 samples of python-docs" in card
        and f"{found.after['loss']:.4g} after" in card
    )


def test_the_same_again(text):
    a, b, task = text
    first, again = (repair(sm.average(a, b), [a, b], task) for _ in range(2))
    assert first.record() == again.record()
    assert all(
        torch.equal(first.model.weights[name], again.model.weights[name])
        for name in first.model.weights
    )


def test_coordinates_without_spread_are_left_alone(text):
    """One that never changes in the merge, and one that never changes in a parent."""
    a, b, task = text
    name = "transformer.h.0.mlp.c_fc"

    def dead(model, unit):
        def weight():
            old = model.weights[f"{name}.weight"].clone()
            old[:, unit] = 0
            return old

        return replace(model, weights=DerivedWeights(model.weights, {f"{name}.weight": weight}))

    merged, parents = dead(sm.average(a, b), 0), [dead(a, 1), dead(b, 1)]
    found = repair(merged, parents, task)
    assert found.left_alone == 2
    for tensor in ("weight", "bias"):
        before, after = (model.weights[f"{name}.{tensor}"] for model in (merged, found.model))
        assert torch.equal(before[..., :2], after[..., :2]) and not torch.equal(
            before[..., 2:], after[..., 2:]
        )


def test_pads_do_not_count_and_the_token_that_answers_does():
    values, mask = torch.zeros(2, 4, 3), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    several = token_weights(values, {"attention_mask": mask, "labels": torch.zeros(2, 4)})
    assert torch.equal(several, mask.double())
    one = token_weights(values, {"attention_mask": mask, "labels": torch.zeros(2)})
    assert one.tolist() == [[3, 1, 1, 1], [1, 1, 0, 0]]
    assert token_weights(values[:, 0], {"labels": torch.zeros(2)}).tolist() == [
        1,
        1,
    ]  # what a pooler gives


def test_bad_input_is_refused(text):
    a, b, task = text
    merged = sm.average(a, b)
    other = sm.load(small_model("gpt2", n_inner=64))
    with pytest.raises(
        MismatchError, match=r"give the models that were averaged; they differ in: ff\.0"
    ):
        repair(merged, [a, other], task)
    with pytest.raises(MismatchError, match="differ in"):
        repair(sm.average(a, b, attention="circuits"), [a, b], task)
    with pytest.raises(MismatchError, match="1 parents but 2 shares: give one share per parent"):
        repair(merged, [a], task)
    with pytest.raises(MismatchError, match=r"sum to 1\.5, not to 1"):
        repair(merged, [a, b], task, shares=(0.75, 0.75))
    few = sm.make_task("clm", "python-docs", [a, b], samples=MIN_SAMPLES - 1)
    with pytest.raises(
        DataError, match=r"7 samples of python-docs are too few for REPAIR: give 8 or more"
    ):
        repair(merged, [a, b], few)
