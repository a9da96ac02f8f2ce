"""Recipes by name, head metrics, self-generated text, token counts, interrupts, resuming."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from differences import difference
from fixtures import run as run_verb

import symmerge as sm
from symmerge.errors import DataError, MismatchError
from symmerge.lab.small_models import small_model
from symmerge.matching.evidence import Evidence, Weighting, read_token_counts
from symmerge.matching.recipes import DATA_FREE, RECIPES, get_recipe, with_options
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.matching.sweeps import Sweeps
from symmerge.models.distances import distance
from symmerge.models.orbit import random_member
from symmerge.models.saving import save
from symmerge.observation.probe import make_probe
from symmerge.symmetry.groups import Gram
from symmerge.symmetry.groups.invertible import descend_invertible, nearest_invertible

FAMILIES = ["bert", "gpt2", "vit", "llama", "neox"]


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    """Rows of 32 tokens, not 256: small models take their time token by token."""
    monkeypatch.setattr("symmerge.observation.probe.LENGTH", 32)


def pair(name, dtype=torch.float64):
    return [sm.load(small_model(name, seed=seed, dtype=dtype)) for seed in (0, 1)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("which", DATA_FREE)
def test_every_recipe_without_data_keeps_both_functions_and_brings_them_closer(name, which):
    a, b = pair(name)
    few = {"tries": 2, "max_sweeps": 3}  # not the best, and a symmetry after every sweep
    result = sm.align(a, b, with_options(RECIPES[which], dtype=torch.float64, **few))
    assert difference(a, result.reference) <= 1e-10
    assert difference(b, result.aligned) <= 1e-10
    assert result.after < result.before
    assert result.after == pytest.approx(distance(result.reference, result.aligned), rel=1e-6)
    assert sm.verify(a, result.aligned).difference > 1e-2  # the control: they are two functions


def test_permutations_move_nothing_but_permutations():
    result = sm.align(*pair("llama"), RECIPES["permutations"])
    for name, element in result.solution.alignment.elements.items():
        assert element.keys() == {"index"}, name
    assert all(
        torch.equal(result.reference.weights[name], pair("llama")[0].weights[name])
        for name in result.reference.weights
    )


def test_published_recipes_miss_what_ours_finds():
    model = sm.load(small_model("vit", dtype=torch.float64))
    moved = random_member(model, seed=1)[1]
    ours, theirs = (
        sm.align(model, moved, with_options(RECIPES[name], dtype=torch.float64))
        for name in ("weights-only", "permutations")
    )
    assert ours.after <= 1e-6 < 0.5 < theirs.after


@pytest.mark.parametrize("metric", ["best", "frobenius", "cosine", "spectrum"])
def test_every_head_metric_finds_planted_heads(metric):
    model = sm.load(small_model("gpt2", dtype=torch.float64))
    moved = random_member(model, seed=2)[1]
    assert (
        sm.align(
            model, moved, with_options(RECIPES["weights-only"], metric=metric, dtype=torch.float64)
        ).after
        <= 1e-6
    )


def test_metrics_differ_on_unrelated_models():
    orders = {}
    for metric in ("frobenius", "spectrum"):
        result = sm.align(
            *pair("gpt2"), with_options(RECIPES["weights-only"], metric=metric, dtype=torch.float64)
        )
        orders[metric] = [
            element["index"].tolist()
            for name, element in result.solution.alignment.elements.items()
            if name.startswith("head")
        ]
    assert orders["frobenius"] != orders["spectrum"]


def test_gradient_refinement_reaches_what_gauss_newton_does():
    generator = torch.Generator().manual_seed(0)
    x, y, u, v = (torch.randn(3, 6, 20, generator=generator, dtype=torch.float64) for _ in range(4))
    turn = torch.linalg.qr(torch.randn(3, 6, 6, generator=generator, dtype=torch.float64))[0]
    write, read = Gram.of(x, turn.mT @ x + 0.1 * u), Gram.of(y, turn.mT @ y + 0.1 * v)

    def cost(g):
        return sum(
            ((h @ gram.right - 2 * gram.cross) * h).sum()
            for h, gram in ((g, write), (torch.linalg.inv(g).mT, read))
        )

    refined = descend_invertible(turn, write, read)
    assert cost(refined) < cost(turn)
    assert cost(refined).item() == pytest.approx(
        cost(nearest_invertible(write, read)).item(), rel=1e-6
    )


def test_unknown_recipe_lists_those_there_are():
    with pytest.raises(MismatchError, match="permutations"):
        get_recipe("git-rebasin")


@pytest.mark.parametrize("name", ["weights-only", "learned", "soft"])
def test_unknown_options_are_refused_with_the_list(name):
    with pytest.raises(MismatchError, match=r"no option sweeps .* choose from .*max_sweeps"):
        with_options(RECIPES[name], sweeps=3)
    with_options(RECIPES[name], max_sweeps=3, metric="cosine", seed=1)  # the control


# self-generated text


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_generated_text_is_the_same_for_the_same_seed(name):
    models = [sm.canonicalize(model) for model in pair(name, torch.float32)]
    first, again, other = (make_probe(models, seed=seed) for seed in (0, 0, 1))
    tokens = [
        torch.cat([batch.inputs["input_ids"] for batch in probe.batches])
        for probe in (first, again, other)
    ]
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(first.targets, again.targets)
    assert not torch.equal(tokens[0], tokens[2])
    assert first.targets.sum(-1).allclose(torch.ones(len(first.targets)), atol=1e-4)
    assert first.observation.a.values.keys() == first.observation.b.values.keys()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_of_many_the_mean_activation_of_all_others_is_observed(name, monkeypatch):
    models = [sm.canonicalize(sm.load(small_model(name, seed=seed))) for seed in range(3)]
    first = make_probe(models)
    text = torch.cat([batch.inputs["input_ids"] for batch in first.batches])
    monkeypatch.setattr(
        "symmerge.evaluation.data.self_generated.sample_text", None
    )  # what is there is not written again
    again, alone = (
        make_probe(models, text=text),
        [make_probe([model, models[2]], text=text) for model in models[:2]],
    )
    for where, seen in again.observation.a.values.items():
        apart = [one.observation.a.values[where] for one in alone]
        assert torch.allclose(seen, (apart[0] + apart[1]) / 2, atol=1e-6) and not torch.allclose(
            *apart, atol=1e-2
        ), where
        assert torch.equal(again.observation.b.values[where], alone[0].observation.b.values[where])
    predicted = [make_probe([model, model], text=text).targets for model in models]
    assert torch.allclose(again.targets, sum(predicted) / 3, atol=1e-6) and torch.equal(
        again.targets, first.targets
    )


def test_nothing_is_generated_for_images():
    assert make_probe(pair("vit", torch.float32)) is None


def test_the_search_keeps_the_best_score_and_says_what_it_tried():
    models = [sm.canonicalize(model) for model in pair("gpt2", torch.float32)]
    solution = sm.WeightMatching(tries=4).solve(*models)
    scores = [trial.score for trial in solution.trials]
    assert len(scores) == 4 and len(set(scores)) > 1
    best = solution.trials[scores.index(min(scores))]
    assert solution.weighting == best.weighting


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_both_precisions_and_the_same_seed_the_same_result(kind):
    models = [sm.canonicalize(model) for model in pair("llama", torch.float32)]
    first, again = (sm.WeightMatching(dtype=kind, tries=2).solve(*models) for _ in range(2))
    assert first.objective == again.objective and first.settings == again.settings
    for name, element in first.alignment.elements.items():
        assert all(
            torch.equal(value, again.alignment[name][part]) for part, value in element.items()
        )


# token counts


def test_tokens_that_never_occurred_are_left_out():
    a, b = (sm.canonicalize(model) for model in pair("gpt2"))
    counts = torch.ones(a.spec.sizes["vocabulary"])
    counts[:20] = 0
    evidence = Evidence(
        table=a.spec,
        weights=(a.weights, b.weights),
        weighting=Weighting(),
        frequencies=counts,
        ignore_unseen=True,
        dtype=torch.float64,
    )
    embedding = next(name for name in a.spec.tensors if "wte" in name)
    rows = evidence.sides(embedding)[0]
    assert rows[:20].abs().max() == 0 and rows[20:].abs().min(1).values.max() > 0


def test_counts_must_fit(tmp_path):
    models = [sm.canonicalize(model) for model in pair("gpt2", torch.float32)]
    with pytest.raises(MismatchError, match="one count per token"):
        sm.WeightMatching(token_counts=torch.ones(3)).solve(*models)
    np.save(tmp_path / "bad.npy", np.array([[1.0, 2.0]]))
    with pytest.raises(MismatchError, match="one count per token"):
        read_token_counts(tmp_path / "bad.npy")
    (tmp_path / "no.npy").write_text("1 2 3")
    with pytest.raises(DataError, match=r"\.npy"):
        read_token_counts(tmp_path / "no.npy")


# interrupts


def test_an_interrupt_keeps_the_best_so_far(monkeypatch):
    a, b = pair("vit")
    sweep = Sweeps.sweep

    def stop_at_third(self):
        if len(self.objective) == 2:
            raise KeyboardInterrupt
        sweep(self)

    monkeypatch.setattr(Sweeps, "sweep", stop_at_third)
    options = with_options(RECIPES["weights-only"], dtype=torch.float64)
    options = replace(
        options,
        matching=replace(options.matching, weighting=Weighting(all_layers=True), tolerance=-1.0),
    )
    result = sm.align(a, b, options)
    assert (
        result.solution.interrupted
        and not result.solution.converged
        and len(result.solution.objective) == 2
    )
    assert difference(b, result.aligned) <= 1e-10
    assert result.after < result.before


def test_resuming_gives_what_one_run_gives(tmp_path, monkeypatch):
    a, b = pair("vit")
    options = with_options(RECIPES["weights-only"], dtype=torch.float64, max_sweeps=5)
    options = replace(
        options,
        matching=replace(options.matching, weighting=Weighting(all_layers=True), tolerance=-1.0),
    )
    straight = sm.align(a, b, options).solution
    resume_file = ResumeFile(tmp_path / "x.partial.safetensors", {"task": 1})
    sweep, done = Sweeps.sweep, []

    def stop_once(self):
        if len(self.objective) == 3 and not done:
            done.append(1)
            raise KeyboardInterrupt
        sweep(self)

    monkeypatch.setattr(Sweeps, "sweep", stop_once)
    assert sm.align(a, b, options, resume_file=resume_file).solution.interrupted
    resumed = sm.align(a, b, options, resume_file=resume_file).solution
    assert not resumed.interrupted and resumed.objective == pytest.approx(
        straight.objective, rel=1e-9
    )


def test_tries_are_not_repeated_after_resuming(tmp_path, monkeypatch):
    a, b = pair("gpt2", torch.float32)
    resume_file = ResumeFile(tmp_path / "x.partial.safetensors", {"task": 1})
    first = sm.align(
        a, b, with_options(RECIPES["symmerge"], tries=3), resume_file=resume_file
    ).solution
    monkeypatch.setattr(Sweeps, "sweep", lambda self: pytest.fail("solved again"))
    again = sm.align(
        a, b, with_options(RECIPES["symmerge"], tries=3), resume_file=resume_file
    ).solution
    assert [trial.score for trial in again.trials] == [trial.score for trial in first.trials]
    assert all(
        torch.equal(first.alignment[n]["index"], again.alignment[n]["index"])
        for n in first.alignment.elements
        if "index" in first.alignment[n]
    )


def test_a_resume_file_of_another_task_is_refused(tmp_path):
    ResumeFile(tmp_path / "j.safetensors", {"models": ["a", "b"]}).write(
        ResumeEntry({"trials": []}, {"best": {"x": {"index": torch.arange(3)}}})
    )
    with pytest.raises(MismatchError, match="another run"):
        ResumeFile(tmp_path / "j.safetensors", {"models": ["a", "c"]}).read()


def test_ctrl_c_on_the_command_line_writes_the_best_so_far(tmp_path, monkeypatch):
    for seed in (0, 1):
        save(sm.load(small_model("gpt2", seed=seed)), tmp_path / str(seed))
    monkeypatch.chdir(tmp_path)
    command = ("align", "0", "1", "--method", "weights", "--out", "found")
    sweep, calls = Sweeps.sweep, []

    def interrupt_second(self):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        sweep(self)

    with monkeypatch.context() as patch:
        patch.setattr(Sweeps, "sweep", interrupt_second)
        assert "interrupted: wrote the best alignment so far" in run_verb(*command).stdout
    record = json.loads((tmp_path / "found" / "solution.json").read_text())
    assert record["interrupted"] and len(record["trials"]) == 1
    assert (tmp_path / "found.partial.safetensors").exists()
    run_verb(*command, "--resume", "--overwrite")
    record = json.loads((tmp_path / "found" / "solution.json").read_text())
    assert not record["interrupted"] and len(record["trials"]) > 1
    assert not (tmp_path / "found.partial.safetensors").exists()
