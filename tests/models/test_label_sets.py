"""Classifiers of different labels: kept side by side, exactly, and mixed row by row."""

import json

import pytest
import torch
from fixtures import checkpoint, run

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.lab.small_models import small_model
from symmerge.models.interpolation import interpolate, mean
from symmerge.models.label_sets import (
    UNKNOWN,
    head_rows,
    known_labels,
    side_by_side,
    with_all_labels,
    with_scaled_labels,
)
from symmerge.verification.inputs import samples
from symmerge.verification.modules import full_module, logits_of

FIRST, SECOND = "abcde", "ecxyzw"
UNION = list("abcdexyzw")
IN_UNION = {"first": [0, 1, 2, 3, 4], "second": [4, 2, 5, 6, 7, 8]}
KINDS = "vit", "bert-classifier"


def classifier(labels, seed, name="vit"):
    named = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
    return sm.load(small_model(name, seed=seed, dtype=torch.float64, **named))


def pair(name="vit"):
    return classifier(FIRST, 0, name), classifier(SECOND, 1, name)


def logits(model, like):
    (values,) = logits_of(model, samples(like, 0)[0], dtype=torch.float64).values()
    return values


@pytest.mark.parametrize("name", KINDS)
def test_heads_side_by_side_keep_every_logit(name):
    a, b = pair(name)
    for model, place, wide in zip((a, b), IN_UNION.values(), side_by_side([a, b]), strict=True):
        assert list(wide.config["id2label"].values()) == UNION
        before, after = logits(model, a), logits(wide, a)
        others = [at for at in range(len(UNION)) if at not in place]
        assert torch.allclose(after[:, place], before, atol=1e-12)
        assert (after[:, others] == UNKNOWN).all()
        assert after.softmax(-1)[:, others].max() < 1e-30
    wrong = logits(side_by_side([a, b])[1], a)[:, IN_UNION["first"]]  # the control
    assert (wrong[:, : len(FIRST)] - logits(b, a)[:, : len(FIRST)]).abs().max() > 1e-2


def test_the_ends_of_a_merge_are_both_classifiers():
    a, b = pair()
    aligned = sm.align(a, b, "weights-only")
    assert sm.verify(side_by_side([a, b])[1], aligned.models[1]).same
    for t, model, place in ((0.0, a, IN_UNION["first"]), (1.0, b, IN_UNION["second"])):
        merged = sm.average(*aligned.models, t)
        own, other = logits(merged, a)[:, place], logits(model, a)
        assert torch.allclose(own, other, atol=1e-9)
        assert (logits(merged, a) > UNKNOWN / 2).all()  # the rows of the other are there, too
    between = logits(sm.average(*aligned.models), a)[:, IN_UNION["first"]]  # the control
    assert (between - logits(a, a)).abs().max() > 1e-2


def test_each_row_is_of_those_who_know_it():
    wide = side_by_side(pair())
    rows, axis = next(item for item in head_rows(wide[0]).items() if item[0].endswith("weight"))
    assert axis == 0
    a, b = (model.weights[rows] for model in wide)
    for merged in (sm.average(*wide), interpolate(*wide), mean(wide), sm.combine(wide)):
        head = merged.weights[rows]
        assert torch.equal(head[[0, 1, 3]], a[[0, 1, 3]])
        assert torch.allclose(head[5:], b[5:])
        assert torch.allclose(head[[2, 4]], (a + b)[[2, 4]] / 2)
        assert not torch.allclose(head[0], (a + b)[0] / 2)  # the control
        assert known_labels(merged).all()
    assert [model.history[-1].step for model in with_all_labels(wide)] == ["heads", "heads"]


def test_what_is_learned_is_the_same_mean():
    wide = side_by_side([*pair(), classifier("xa", 2)])
    for name in head_rows(wide[0]):
        scaled = sum(model.weights[name] for model in with_scaled_labels(wide)) / 3
        filled = mean(wide).weights[name]
        known = torch.stack([known_labels(model) for model in wide]).sum(0)
        for at in range(len(UNION)):  # `mean` counts who does not know a row like the others' mean
            assert torch.allclose(scaled[at], filled[at]), (name, at, known[at])
    plain = sum(model.weights["classifier.bias"] for model in wide) / 3  # the control
    assert (plain - mean(wide).weights["classifier.bias"]).abs().max() > 10


def test_the_same_labels_in_another_order_are_one_set():
    a, b = classifier("abcde", 0), classifier("baced", 1)
    first, second = side_by_side([a, b])
    assert first.config["id2label"]["0"] == second.config["id2label"]["0"] == "a"
    assert torch.allclose(logits(second, a), logits(b, a)[:, [1, 0, 2, 4, 3]])
    assert known_labels(second).all()
    same = classifier("abcde", 1)
    assert side_by_side([a, same]) == [a, same]  # untouched


def test_merge_keeps_heads_side_by_side(tmp_path):
    folders = [
        checkpoint(tmp_path / name, "vit", seed=seed, num_labels=len(labels),
                   id2label=dict(enumerate(labels)))
        for seed, (name, labels) in enumerate({"a": FIRST, "b": SECOND}.items())
    ]  # fmt: skip
    said = run("merge", *folders, "--effort", "fast", "--out", tmp_path / "out")
    assert "side by side" in said.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config["id2label"].values()) == UNION
    merged = sm.load(tmp_path / "out")
    assert full_module(merged, torch.float32).classifier.out_features == len(UNION)
    assert "labels that it does not know" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("vit", {"num_labels": 9}, "name them in id2label"),
        ("vit", {"num_labels": 3, "id2label": dict(enumerate("xxy"))}, "each once"),
        ("vit", {"problem_type": "multi_label_classification",
                 "id2label": dict(enumerate("vwxyz"))}, "their tasks differ"),
        ("gpt2", {}, "different"),
    ],
)  # fmt: skip
def test_heads_that_cannot_stand_side_by_side_are_refused(name, changes, why):
    a, other = classifier(FIRST, 0), sm.load(small_model(name, seed=1, **changes))
    with pytest.raises(MismatchError, match=why):
        side_by_side([a, other])
    assert len(side_by_side(pair())) == 2  # the control
