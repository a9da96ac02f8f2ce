"""The verb: a model or an adapter comes out, with a verdict; bad input is one line, no folder."""

import json
from dataclasses import replace

import pytest
import torch
from fixtures import checkpoint, run
from transported import apart, fine_tuned

import symmerge as sm
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment
from symmerge.models.orbit import random_member
from symmerge.transporting.carrying import carried
from symmerge.transporting.job import find_passage
from symmerge.transporting.learning import balanced, learn_passage
from symmerge.transporting.options import TransportOptions
from symmerge.transporting.transport_results import grade

NAME = "gpt2-untied"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, its fine-tune, members of its orbit, strangers; nobody changes them."""
    root = tmp_path_factory.mktemp("transport")
    small_model(NAME).save_pretrained(root / "base")
    fine_tuned(small_model(NAME)).save_pretrained(root / "tuned")
    sm.save(random_member(sm.load(root / "base"), 3)[1], root / "other")
    checkpoint(root / "stranger", NAME, seed=5)
    fine_tuned(small_model(NAME, seed=5)).save_pretrained(root / "stranger2")
    checkpoint(root / "deep", NAME, n_layer=3)
    checkpoint(root / "llama", "llama")
    small_model(NAME, vocab_size=90).save_pretrained(root / "tokens")
    grown = fine_tuned(small_model(NAME, vocab_size=104))
    known = fine_tuned(small_model(NAME)).state_dict()
    with torch.no_grad():
        for name, value in grown.state_dict().items():
            value[tuple(map(slice, known[name].shape))] = known[name]
    grown.save_pretrained(root / "grown")
    return root


def transport(place, out, *more, base="base", tuned="tuned", to="other", expect=0):
    folders = ("--from", place / base, "--tuned", place / tuned, "--to", place / to)
    return run("transport", *folders, "--out", out, *more, expect=expect)


def test_a_fine_tune_is_carried_and_judged(place, tmp_path):
    said = transport(place, tmp_path / "out", "--scale", "1").stdout
    assert "How much arrived?" in said and "100%" in said
    assert same(place / "tuned", tmp_path / "out")
    assert not same(place / "base", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "transport.json").read_text())
    assert record["verdict"] == "arrived" and record["learned"] == 0
    transport(place, tmp_path / "lost", "--method", "none", "--no-verdict")
    assert not same(place / "tuned", tmp_path / "lost")  # the control


def test_an_alignment_that_was_saved_and_a_scale(place, tmp_path):
    folders = (place / "base", place / "other")
    run("align", *folders, "--effort", "fast", "--no-verdict", "--out", tmp_path / "aligned")
    more = ("--alignment", tmp_path / "aligned", "--scale", "1", "--no-verdict")
    transport(place, tmp_path / "out", *more)
    assert same(place / "tuned", tmp_path / "out")
    transport(place, tmp_path / "half", *more[:2], "--scale", "0.5", "--no-verdict")
    # Of other models: of another OTHER, of another BASE (the same table, each).
    for wrong, name in (({"to": "stranger"}, "other"), ({"base": "stranger"}, "base")):
        who = {"tuned": "stranger2", **wrong} if "base" in wrong else wrong
        result = transport(place, tmp_path / "wrong", *more, **who, expect=2)
        assert f"made for {place / name}" in result.output.replace("\n", "")
    assert not same(place / "tuned", tmp_path / "half")


def test_new_tokens_are_carried_and_what_arrived_is_healed(place, tmp_path):
    transport(place, tmp_path / "out", "--scale", "1", "--no-verdict", tuned="grown")
    assert same(place / "grown", tmp_path / "out")
    more = ("--method", "none", "--no-verdict", "--heal", "2")
    transport(place, tmp_path / "healed", *more, "--overwrite")
    history = sm.load(tmp_path / "healed")
    record = json.loads((tmp_path / "healed" / "symmerge.json").read_text())
    assert [step["step"] for step in record["steps"]][-2:] == ["transport", "heal"], history


def same(a, b):
    return sm.verify(sm.load(a), sm.load(b)).same


BAD = {
    "no fine-tune": ({"tuned": "stranger"}, (), "not a fine-tune"),
    "nothing to carry": ({"tuned": "base"}, (), "nothing to carry"),
    "fewer tokens": ({"tuned": "tokens"}, (), "smaller"),
    "heal": ({}, ("--heal", "-1"), "heal"),
    "another depth": ({"to": "deep"}, (), "layers"),
    "another architecture": ({"to": "llama"}, (), "LlamaForCausalLM"),
    "no such folder": ({"tuned": "nowhere"}, (), "nowhere"),
    "scale": ({}, ("--scale", "-1"), "scale"),
    "effort": ({}, ("--effort", "huge"), "effort"),
    "steps of nothing": ({}, ("--steps", "3", "--scale", "1"), "steps"),
    "effort for nothing": ({}, ("--effort", "best", "--scale", "1"), "effort"),
    "two ways": ({}, ("--effort", "fast", "--method", "weights"), "one of them"),
    "no alignment": ({}, ("--alignment", "nowhere.safetensors"), "alignment"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(place, tmp_path, case):
    who, more, reason = BAD[case]
    result = transport(place, tmp_path / "out", *more, **who, expect=2)
    assert reason in result.output and "Traceback" not in result.output
    assert not any(tmp_path.iterdir())


def test_activations_need_no_data(place):
    base, tuned, other = (sm.load(place / name) for name in ("base", "tuned", "other"))
    how = {"method": "activations", "verdict": False}
    assert sm.verify(sm.transport(base, tuned, other, **how).model, tuned).same
    still = sm.transport(base, tuned, other, **{**how, "method": "none"}).model
    assert not sm.verify(still, tuned).same  # the control


def test_several_are_checked_before_anything_is_carried():
    for pairs, how in (
        ([], {}),
        ([("a", "b")], {"method": "sum"}),
        ([("a", "b")], {"weights": [1.0, 2.0]}),
    ):
        with pytest.raises(MismatchError, match=r"give|choose"):
            sm.transport_all(pairs, "nowhere", **how)


def test_a_change_that_does_harm_is_called_lost():
    losses = {"base": 3.0, "tuned": 1.0, "other": 3.0}
    share, word, sentence = grade({**losses, "carried": 5.0})
    assert (share, word) == (-1.0, "lost") and "worse" in sentence
    assert "worse" not in grade({**losses, "carried": 2.9})[2]


def test_learning_brings_answers_closer_and_is_the_same_for_the_same_seed(place):
    base, tuned, other = (sm.load(place / name) for name in ("base", "tuned", "stranger"))
    passage, _ = find_passage(base, other, TransportOptions(effort="fast"), lambda _: None)
    task = make_task("clm", "self", [tuned], samples=40, length=16)
    first, again = (learn_passage(passage, tuned, data=task, steps=8) for _ in range(2))
    assert first.losses == again.losses and first.scales == again.scales
    assert first.steps == 8 and min(first.losses) < first.losses[0] - 1e-3
    moved = carried(first.passage, tuned, first.scales)
    again = carried(again.passage, tuned, again.scales)
    assert all(torch.equal(moved.weights[n], again.weights[n]) for n in moved.weights)


def test_what_is_learned_from_is_what_is_written(place):
    base, tuned, other = (sm.load(place / name) for name in ("base", "tuned", "stranger"))
    passage, _ = find_passage(base, other, TransportOptions(effort="fast"), lambda _: None)
    canonical, change = balanced(passage, tuned)
    back = Alignment(change.spec, passage.alignment.elements).inverse()
    tensors = {
        n: canonical.weights[n] + back.transport(n, change.weights[n]) for n in change.weights
    }
    learned_from = replace(canonical, weights=MemoryWeights(tensors))
    written = carried(passage, tuned)
    assert apart(learned_from, written) < 1e-4 < 1e-2 < apart(canonical, written)


def test_several_fine_tunes_and_a_wider_model(place):
    base, tuned = (sm.load(place / name) for name in ("base", "tuned"))
    other = sm.load(place / "other")
    pairs = [(base, tuned)] * 2
    merged = sm.transport_all(pairs, other, method="ties", density=1.0, scale=1.0)
    assert sm.verify(merged, sm.transport(base, tuned, other, scale=1.0, verdict=False).model).same
    wide = sm.widen(base, sm.load(small_model(NAME, n_embd=64, n_inner=128)))
    carried = sm.transport(base, tuned, wide, method="none", verdict=False).model
    assert sm.verify(carried, tuned).same and not sm.verify(carried, base).same
    # Back to the narrow model, from a wide one that has nothing it has no room for.
    back = sm.transport(wide, carried, base, method="none", verdict=False).model
    assert back.spec.sizes == base.spec.sizes and sm.verify(back, tuned).same
    with pytest.raises(MismatchError, match="differ in width"):
        sm.transport(base, sm.load(place / "grown"), wide)
