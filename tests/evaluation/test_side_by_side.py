"""evaluate: each model's own metrics, the ensemble, refusals, lm-eval."""

import json
import sys

import pytest
import torch
from fixtures import checkpoint, run, tokenizer
from task_data import TEXT, evaluate

import symmerge as sm
from symmerge.cli import console
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.evaluation_results import EvaluationFile
from symmerge.evaluation.harness import Harness
from symmerge.evaluation.tasks.preprocessing import max_length
from symmerge.verification.modules import full_module


def test_metrics_are_each_models_own_and_the_ensemble_is_that_of_the_line(model, text):
    a, b = model("gpt2"), model("gpt2", 1)
    task = sm.make_task("clm", str(text), [a, b], samples=6)
    result = sm.evaluate([a, b], str(text), samples=6)
    for one, found in zip((a, b), result.models, strict=True):
        assert found.metrics == pytest.approx(evaluate(task, one), rel=1e-6)
        assert found.sha256 == one.digest() and found.where == one.where
    assert result.models[0].metrics != pytest.approx(result.models[1].metrics)  # the control
    assert result.ensemble == pytest.approx(sm.barrier(a, b, task, 2).ensemble, rel=1e-6)
    assert result.task == task.to_record()
    assert sm.evaluate(a, task).models[0].metrics == result.models[0].metrics
    assert sm.evaluate(a, task).ensemble is None
    assert EvaluationFile.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert len(repr(result).splitlines()) <= 3


def test_sizes_may_differ_and_all_read_the_same_text(model, text):
    large, small = model("gpt2"), model("gpt2", 1, n_inner=40, n_positions=16)
    assert max_length(small) < max_length(large)
    result = sm.evaluate([large, small], str(text), samples=4)
    assert result.task.settings["block"] == 16
    task = sm.make_task("clm", str(text), [small], samples=4)
    assert result.models[0].metrics == pytest.approx(evaluate(task, large), rel=1e-6)
    best = min(one.metrics["loss"] for one in result.models)
    assert result.best("loss") == best and result.best("perplexity") == pytest.approx(
        torch.tensor(best).exp().item(), rel=1e-5
    )
    assert result.ensemble is not None


def test_images_come_in_the_form_of_each_model(model, pictures):
    data = str(pictures / "pictures.npz")
    a, b = model("vit"), model("vit", 1, image_size=8)
    result = sm.evaluate([a, b], data)
    for one, found in zip((a, b), result.models, strict=True):
        task = sm.make_task("image", data, [one])
        assert found.metrics == pytest.approx(evaluate(task, one), rel=1e-5)
    both = torch.stack([_probabilities(one, data) for one in (a, b)]).mean(0)
    labels = torch.cat([batch["labels"] for batch in sm.make_task("image", data, [a]).batches])
    accuracy = (both.argmax(-1) == labels).float().mean().item()
    assert result.ensemble["accuracy"] == pytest.approx(accuracy)
    assert result.best("accuracy") == max(one.metrics["accuracy"] for one in result.models)


def _probabilities(one, data):
    module = full_module(one, torch.float32)
    batches = sm.make_task("image", data, [one]).batches
    with torch.no_grad():
        logits = [module(pixel_values=batch["pixel_values"]).logits for batch in batches]
    return torch.cat(logits).softmax(-1)


def test_without_data_models_read_their_own_text(model):
    a, b = model("gpt2"), model("gpt2", 1)
    own = sm.evaluate([a, b], samples=4)
    assert own.task.data == "self" and own.task.samples == 4
    for name, why in (("vit", "no labels"), ("bert-classifier", "no text without data")):
        with pytest.raises(MismatchError, match=f"no data: .*{why}.*; give --data: "):
            sm.evaluate(model(name))
    other = model("gpt2", 1, vocab_size=90)
    with pytest.raises(MismatchError, match="cannot read each other's text: give --data"):
        sm.evaluate([a, other])
    with pytest.raises(MismatchError, match=r"for masked-lm: evaluate them one by one"):
        sm.evaluate([a, model("bert")])
    with pytest.raises(MismatchError, match="no model: give one or more"):
        sm.evaluate([])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("folders")
    (home / "text.txt").write_text(TEXT)
    return [*(checkpoint(home / f"seed-{seed}", "gpt2", seed=seed) for seed in (0, 1)), home]


def test_the_verb_prints_a_table_and_writes_a_file(folders, tmp_path, monkeypatch):
    a, b, home = folders
    data = ("--data", home / "text.txt", "--samples", 4)
    said = run("evaluate", a, b, *data, "--out", tmp_path / "e.json").stdout.splitlines()
    assert said[0].startswith("# clm on ") and "4 samples" in said[0]
    rows = [line.split("\t") for line in said[1:]]
    assert rows[0] == ["model", "loss", "perplexity", "bits_per_character"]
    assert [row[0] for row in rows[1:]] == [str(a), str(b), "ensemble of both"]
    written = EvaluationFile.read(tmp_path / "e.json")
    assert float(rows[1][1]) == pytest.approx(written.models[0].metrics["loss"], rel=1e-3)
    assert json.loads(run("evaluate", a, b, *data, "--json").stdout) == written.to_json()
    said = run("evaluate", a, b, "--samples", 4).stdout
    assert "self-generated inputs (the models sample text; no data was given)" in said
    (tmp_path / "mine.json").write_text("{}")
    said = run("evaluate", a, *data, "--out", tmp_path / "mine.json", expect=2).stderr
    assert "symmerge did not write it" in said
    monkeypatch.setattr(console, "show_table", lambda title, rows: shown.extend(rows))
    monkeypatch.setattr(type(console.out), "is_terminal", True)
    shown = []
    run("evaluate", a, b, *data)
    best = min(range(2), key=lambda number: written.models[number].metrics["loss"])
    assert [row["loss"].endswith(" *") for row in shown] == [best == 0, best == 1, False]


def test_lm_eval_is_named_where_it_is_missing(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = run("evaluate", folders[0], "--lm-eval", "piqa", expect=2).stderr
    assert "--lm-eval needs the package lm_eval: pip install 'symmerge[lm-eval]'" in said
    assert said.count("\n") == 1


TASK = """task: endings_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def local_task(tmp_path, monkeypatch):
    """A task whose data lies here, with choices of which small models get some right."""
    pytest.importorskip("lm_eval", reason="pip install 'symmerge[lm-eval]'")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [
        {"question": f"Line {n} ends with", "choices": [f" {n}a", f" b{n}"], "answer": n % 2}
        for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "endings.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))
    return tmp_path, rows


def test_lm_eval_scores_a_local_task(folders, local_task):
    include, rows = local_task
    asked = ("--lm-eval", "endings_local", "--lm-eval-include", include)
    result = json.loads(run("evaluate", *folders[:2], *asked, "--json").stdout)
    found = [one["lm_eval"]["endings_local"]["acc"] for one in result["models"]]
    by_hand = [_share_right(sm.load(folder), rows) for folder in folders[:2]]
    assert found == pytest.approx(by_hand) and result["task"] is None
    assert by_hand[0] != by_hand[1] or 0 < by_hand[0] < 1  # the control: not all right or wrong
    table = run("evaluate", folders[0], *asked, "--data", folders[2] / "text.txt").stdout
    assert "loss\t" in table and "endings_local acc" in table
    with pytest.raises(DataError, match="lm-eval knows no such task"):
        sm.evaluate(folders[0], lm_eval=Harness(tasks=("gone",), include=include))
    said = run("evaluate", folders[0], *asked[:2], "--lm-eval-include", "gone", expect=2).stderr
    assert "give a folder with YAML files" in said


def _share_right(one, rows):
    """Accuracy by summed log-probabilities of the choices' tokens, without lm-eval."""
    module, tokens = full_module(one, torch.float32), tokenizer()
    right = 0
    for row in rows:
        start = len(tokens(row["question"], add_special_tokens=False)["input_ids"])
        sums = []
        for choice in row["choices"]:
            ids = tokens(row["question"] + choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = module(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(logits[at - 1, ids[at]].item() for at in range(start, len(ids))))
        right += sums.index(max(sums)) == row["answer"]
    return right / len(rows)
