"""Learned shares: each part's own t, by gradient."""

import pytest
import torch
from fixtures import checkpoint, run

import symmerge as sm
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import small_model
from symmerge.merging.healing import HealOptions
from symmerge.merging.shares import learn_shares


@pytest.fixture(scope="module")
def pair():
    models = [sm.load(small_model("gpt2", seed=seed)) for seed in (0, 1)]
    return models, make_task("clm", "self", models, samples=24, length=12, seed=3)


def learned(models, task, steps=6, lr=0.05):
    options = HealOptions(steps=steps, lr=lr, data=task, batch_size=8)
    return learn_shares(*models, options=options)


def test_shares_make_the_merge_answer_more_like_its_parents(pair):
    result = learned(*pair)
    assert result.after < result.before and len(set(result.at.values())) > 1
    assert {"residual", "ff.0", "vo.1"} <= result.at.keys()
    still = learned(*pair, lr=1e-9)  # the control
    assert all(value == pytest.approx(0.5, abs=1e-6) for value in still.at.values())
    assert still.after == pytest.approx(still.before, abs=1e-4)


def test_merge_learns_shares(tmp_path, monkeypatch):
    monkeypatch.setattr("symmerge.merging.plan.STEPS", 3)
    a, b = (checkpoint(tmp_path / name, "gpt2", seed=seed) for seed, name in enumerate("ab"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over a lazy dog.\n" * 200)
    flags = ("--method", "none", "--no-verdict", "--data", tmp_path / "text.txt", "--samples", 24)
    run("merge", a, b, *flags, "--at", "learned", "--out", tmp_path / "out")
    merged, plain = sm.load(tmp_path / "out"), sm.average(sm.load(a), sm.load(b))
    assert "ff.0 at 0." in (tmp_path / "out" / "symmerge.json").read_text()
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(merged.weights[name], plain.weights[name])
    refused = run("merge", a, b, *flags, "--at", "lerned", "--out", tmp_path / "x", expect=2)
    assert "write NAME=T" in refused.stderr
