"""Healing: better than the merge it began as, stock, reproducible, and safe when it goes wrong."""

import math

import pytest
import torch
from fixtures import checkpoint, run
from transformers import AutoModelForMaskedLM

import symmerge as sm
from symmerge.errors import MismatchError
from symmerge.evaluation.tasks import make_task
from symmerge.lab.small_models import small_model
from symmerge.merging.healing import Healer, HealOptions, heal
from symmerge.merging.verdict_results import MergeVerdict
from symmerge.verification.modules import full_module


def pair(name, **changes):
    return [sm.load(small_model(name, seed=seed, **changes)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def gpt2():
    models = pair("gpt2")
    return models, make_task("clm", "self", models, samples=24, length=12, seed=3)


def healed(models, task, steps=6, **how):
    how = {"batch_size": 8, "lr": 3e-3, **how}
    return heal(sm.average(*models), models, options=HealOptions(steps=steps, data=task, **how))


def weights(model):
    return {name: model.weights[name] for name in model.weights}


def same(a, b):
    return all(torch.equal(tensor, b.weights[name]) for name, tensor in weights(a).items())


def test_a_healed_merge_answers_more_like_its_parents(gpt2):
    models, task = gpt2
    result = healed(models, task)
    assert result.after < result.before - 0.02 and result.history.best_step == 6
    untouched = healed(models, task, lr=1e-9)  # the control: nothing is learned
    assert untouched.after == pytest.approx(untouched.before, abs=1e-4)
    merged = sm.average(*models)
    loss = {
        kind: sm.judge(model, models, task).of("merge")[0].loss
        for kind, model in (("before", merged), ("after", result.model))
    }
    assert loss["after"] < loss["before"]


def test_the_same_seed_heals_the_same(gpt2):
    models, task = gpt2
    first, again, other = (healed(models, task, 3, seed=seed).model for seed in (1, 1, 2))
    assert same(first, again) and not same(first, other)


@pytest.mark.parametrize("lr", [1e38, 10.0])
def test_a_heal_that_diverges_keeps_the_last_good_state(gpt2, lr):
    models, task = gpt2
    said = []
    merged = sm.average(*models)
    options = HealOptions(steps=6, data=task, batch_size=8, lr=lr)
    result = heal(merged, models, options=options, progress=said.append)
    assert result.history.failed and result.history.step < 6 and result.model is merged
    assert any("not healed" in line for line in said)
    assert any("lower --heal-lr" in line for line in said)


def test_an_interrupted_heal_keeps_the_best_so_far(gpt2, monkeypatch):
    models, task = gpt2
    advance = Healer.advance

    def interrupted(self, step):
        if step == 3:
            raise KeyboardInterrupt
        return advance(self, step)

    monkeypatch.setattr(Healer, "advance", interrupted)
    result = healed(models, task)
    assert result.history.interrupted and result.history.best_step == 3
    assert result.after < result.before
    assert result.model.history[-1].step == "heal"


def test_ties_stay_ties_and_buffers_stay(tmp_path):
    models = pair("bert")
    task = make_task("mlm", "self", models, samples=12, length=12)
    result = healed(models, task, 3)
    sm.save(result.model, tmp_path / "out")
    stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    decoder, embedding = stock.get_output_embeddings(), stock.get_input_embeddings()
    assert torch.equal(decoder.weight, embedding.weight)
    inputs = torch.arange(8)[None]
    ours = full_module(result.model, torch.float32)(input_ids=inputs).logits
    assert torch.allclose(stock(input_ids=inputs).logits, ours, atol=1e-5)
    before = full_module(sm.average(*models), torch.float32)(input_ids=inputs).logits
    assert not torch.allclose(before, ours, atol=1e-2)  # the control


@pytest.mark.parametrize("name", ["vit", "roformer"])
def test_what_a_stock_class_does_not_train_stays(name):
    models = pair(name)
    merged = sm.average(*models)
    how = {"generated": 12, "batch_size": 4, "lr": 3e-3}
    how |= {"generated_length": 12} if name == "roformer" else {}
    result = heal(merged, models, options=2, **how)
    moved = {key for key, value in weights(merged).items() if not torch.equal(
        value, result.model.weights[key])}  # fmt: skip
    still = weights(merged).keys() - moved
    assert moved and all("embed_positions" in key for key in still)


def test_the_model_that_is_healed_stays_as_it_was(gpt2):
    models, task = gpt2
    before = {name: value.clone() for name, value in weights(models[0]).items()}
    result = heal(models[0], models, options=2, data=task, batch_size=8, lr=3e-3)
    assert all(torch.equal(value, models[0].weights[name]) for name, value in before.items())
    assert not same(models[0], result.model)  # the control


def test_the_precision_of_the_merge_is_kept(gpt2):
    models, task = gpt2
    half = [sm.load(small_model("gpt2", seed=seed).half()) for seed in (0, 1)]
    result = heal(sm.average(*half), models, options=2, data=task, batch_size=8)
    assert result.model.dtype == torch.float16


def test_merge_heals(tmp_path):
    a, b = (checkpoint(tmp_path / name, "gpt2", seed=seed) for seed, name in enumerate("ab"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over a lazy dog.\n" * 200)
    flags = ("--method", "none", "--data", tmp_path / "text.txt", "--samples", 24)
    said = run("merge", a, b, *flags, "--heal", 5, "--out", tmp_path / "out").stdout
    verdict = MergeVerdict.read(tmp_path / "out" / "verdict.json")
    (before,), (after,) = verdict.of("unhealed"), verdict.of("merge")
    assert after.loss != before.loss and "merge before healing" in said
    step = sm.load(tmp_path / "out").path / "symmerge.json"
    assert '"step": "heal"' in step.read_text()
    assert "then healed" in (tmp_path / "out" / "README.md").read_text()
    page = tmp_path / "page.html"
    run("report", tmp_path / "out", "--out", page)
    assert "merge before healing" in page.read_text()


def test_what_cannot_be_healed_is_refused_before_any_work(gpt2, tmp_path):
    a, b = (checkpoint(tmp_path / name, "gpt2", seed=seed) for seed, name in enumerate("ab"))
    flags = ("--effort", "fast", "--out", tmp_path / "out")
    for more, why in (
        (("--heal", 3, "--attention", "circuits"), "--heal works on stock checkpoints"),
        (("--heal-lr", 0.1), "nothing is healed"),
        (("--heal", 3, "--heal-lr", -1), "give a number above 0"),
        (("--heal", 3, "--mergekit", tmp_path / "m.yml"), "mergekit cannot merge with"),
    ):
        assert why in run("merge", a, b, *flags, *more, expect=2).stderr
    assert not (tmp_path / "out").exists()
    texts = pair("bert-classifier")
    with pytest.raises(MismatchError, match="no inputs without data"):
        heal(sm.average(*texts), texts, options=1)
    with pytest.raises(MismatchError, match="only text shows"):
        HealOptions(steps=1, target="bayes").check(sm.load(small_model("vit")))
    assert math.isfinite(healed(*gpt2, 1).after)  # the control
