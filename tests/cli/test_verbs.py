"""barrier, report and train from end to end: they write what the library says, every time."""

import csv
import json
import re
import statistics
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import yaml
from fixtures import checkpoint, run
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    pipeline,
)

import symmerge as sm
from symmerge.cli import barrier as verb
from symmerge.evaluation.tasks import make_task
from symmerge.lab.training import recipes
from symmerge.models.progress import Phase
from symmerge.verification.modules import full_module

TEXT = "The loss on the line, and what alignment leaves of it. " * 60
CURVES = ("curve.json", "curve.csv", "curve.svg")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where models and results of this file are; nobody changes what is there."""
    root = tmp_path_factory.mktemp("verbs")
    (root / "text.txt").write_text(TEXT)
    return root


@pytest.fixture(scope="module")
def model(place):
    @cache
    def make(name="gpt2", seed=0, **changes):
        return checkpoint(place / "-".join([name, str(seed), *changes]), name, seed=seed, **changes)

    return make


@pytest.fixture(scope="module")
def measure(place):
    """The lines between models on four blocks of the text: curve.json, and the folder."""

    def barrier(out, *models, method="none,permutations", more=()):
        task = ("--task", "clm", "--data", place / "text.txt", "--samples", 4, "--points", 3)
        return json.loads(
            run(
                "barrier", *models, *task, "--method", method, "--out", place / out, "--json", *more
            ).stdout
        ), place / out

    return barrier


@pytest.fixture(scope="module")
def two(measure, model):
    return measure("two", model(), model(seed=1))


@pytest.fixture(scope="module")
def three(measure, model):
    return measure("three", *(model(seed=seed) for seed in range(3)))


def names(folder):
    return sorted(item.name for item in folder.glob("[!.]*"))


def task_of(place, *folders):
    models = [sm.load(folder) for folder in folders]
    return make_task("clm", str(place / "text.txt"), models, samples=4), models


def alone(task, model):
    return task.evaluate(full_module(model, torch.float32))


# barrier


def test_the_ends_are_the_models_and_the_middle_their_average(two, place, model):
    record, folder = two
    assert (
        record == json.loads((folder / "curve.json").read_text())
        and record["schema"] == "symmerge.curve/1"
    )
    task, (a, b) = task_of(place, model(), model(seed=1))
    plain, moved = record["methods"]
    expected = [alone(task, one)["loss"] for one in (a, sm.average(a, b), b)]
    assert [point["loss"] for point in plain["points"]] == pytest.approx(expected, rel=1e-6)
    assert [moved["points"][at]["loss"] for at in (0, -1)] == pytest.approx(
        [expected[0], expected[-1]], rel=1e-4
    )
    assert (
        abs(moved["points"][1]["loss"] - expected[1]) > 1e-3
    )  # the control: alignment changes what lies between


def test_the_alignment_is_kept_where_there_is_one(two, three, measure, model):
    assert names(two[1]) == sorted([*CURVES, "solution.json", "structure.json"])
    assert (
        names(three[1])
        == names(measure("plain", model(), model(seed=1), method="none")[1])
        == sorted(CURVES)
    )
    solution, structure = (
        json.loads((two[1] / f"{name}.json").read_text()) for name in ("solution", "structure")
    )
    assert (
        solution["objective"] == two[0]["methods"][1]["objective"]
        and solution["distance_after"] < solution["distance_before"]
    )
    assert {space["space"] for space in structure["spaces"]} >= {"residual", "ff.0"}


def test_every_pair_of_three_models(two, three):
    record, folder = three
    assert record["schema"] == "symmerge.curves/1" and record == json.loads(
        (folder / "curve.json").read_text()
    )
    ends = [tuple(pair["models"][side]["where"][-1] for side in "ab") for pair in record["pairs"]]
    assert ends == [("0", "1"), ("0", "2"), ("1", "2")]
    assert record["pairs"][0] == two[0] != record["pairs"][1]  # a pair is what it is alone
    barriers = [pair["methods"][1]["barrier_mean"] for pair in record["pairs"]]
    error = statistics.stdev(barriers) / 3**0.5
    assert error > 1e-4 and record["summary"]["permutations"]["barrier_mean"] == pytest.approx(
        {"mean": statistics.fmean(barriers), "error": error}
    )
    rows = list(csv.DictReader((folder / "curve.csv").open()))
    assert [row["pair"] for row in rows] == ["0"] * 7 + ["1"] * 7 + ["2"] * 7
    assert (
        "band-permutations" in (folder / "curve.svg").read_text()
        and "band" not in (two[1] / "curve.svg").read_text()
    )


def test_what_is_printed(place, model, three):
    """Barriers of one pair; of several their means, with errors."""
    arguments = (
        "--task",
        "clm",
        "--data",
        place / "text.txt",
        "--samples",
        4,
        "--points",
        3,
        "--method",
        "none",
    )
    one, several = (
        run(
            "barrier",
            *(model(seed=seed) for seed in range(n)),
            *arguments,
            "--out",
            place / f"printed-{n}",
        ).stdout.splitlines()
        for n in (2, 3)
    )
    assert (
        one[0].startswith("# Barriers: clm on ")
        and "pairs" not in one[0]
        and "3 pairs" in several[0]
    )
    barriers = ["barrier over the mean", "barrier over the line"]
    assert one[1].startswith("# loss (perplexity): A ") and "their ensemble" in one[1]
    midpoint = ["loss of the midpoint", "perplexity of the midpoint"]
    assert one[2].split("\t") == ["method", *midpoint, *barriers]
    assert several[-3] == "# Means over 3 pairs"
    assert several[-2].split("\t")[1:3] == [barriers[0], "standard error over the mean"]
    found = three[0]["summary"]["none"]["barrier_mean"]
    assert several[-1].split("\t")[:3] == [
        "plain average",
        f"{found['mean']:.3g}",
        f"{found['error']:.3g}",
    ]


def test_progress_is_told_for_each_pair(measure, model, monkeypatch):
    told = []
    monkeypatch.setattr(verb.console, "note", told.append)
    for count in (3, 2):
        measure(f"told-{count}", *(model(seed=seed) for seed in range(count)), method="none")
    pairs = [line for line in told if isinstance(line, Phase) and "gpt2-" in line]
    assert [line.rpartition("gpt2-")[2] for line in pairs] == [
        "1, pair 1 of 3",
        "2, pair 2 of 3",
        "2, pair 3 of 3",
        "1",
    ]


def test_the_same_command_gives_the_same_bytes(two, measure, model):
    """Curves and structure to the byte; of the solution all but how long it took."""
    _, again = measure("again", model(), model(seed=1))
    for file in (*CURVES, "structure.json"):
        assert (two[1] / file).read_bytes() == (again / file).read_bytes(), file
    first, second = (
        json.loads((folder / "solution.json").read_text()) for folder in (two[1], again)
    )
    assert first.pop("seconds") != second.pop("seconds") and first == second
    other, _ = measure(
        "other", model(), model(seed=1), more=("--seed", 1)
    )  # the control: other samples
    assert other["methods"][0]["points"] != two[0]["methods"][0]["points"]


def test_models_from_a_file_of_options(two, place, model):
    options = {
        "models": [str(model()), str(model(seed=1))],
        "task": "clm",
        "data": str(place / "text.txt"),
        "samples": 4,
        "points": 3,
    }
    (place / "options.yaml").write_text(
        yaml.safe_dump({**options, "method": "none,permutations", "out": str(place / "from-file")})
    )
    run("barrier", "--config", place / "options.yaml")
    assert (place / "from-file/curve.json").read_bytes() == (two[1] / "curve.json").read_bytes()


# models -> what the line must say; each is a list of (seed, changes)
A, B, OTHER = (0, {}), (1, {}), (1, {"n_inner": 64})
REFUSED = {
    "none": ([], (), "no model: a line has two ends; give two or more models"),
    "one": ([A], (), "gpt2-0: a line has two ends; give two or more models"),
    "twice": ([A, B, A], (), "gpt2-0 is given twice: name every model only once"),
    "another size": ([A, B, OTHER], (), "cannot be joined by a line"),
    "one point": ([A, B], ("--points", 1), "points 1: a curve needs at least two, its ends"),
    "unknown method": ([A, B], ("--method", "none,magic"), "no recipe called 'magic'"),
    "unknown device": ([A, B], ("--device", "abacus"), "device abacus: choose cpu or cuda"),
    "unknown task": (
        [A, B],
        ("--task", "chess"),
        "task chess: choose one of mlm, clm, seq2seq, image, text",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line(tmp_path, place, model, monkeypatch, case):
    models, more, words = REFUSED[case]
    monkeypatch.setattr(verb, "solve_pair", lambda *_, **__: pytest.fail("it began to work"))
    given = [model(seed=seed, **changes) for seed, changes in models]
    result = run(
        "barrier",
        *given,
        "--task",
        "clm",
        "--data",
        place / "text.txt",
        "--out",
        tmp_path / "out",
        *more,
        expect=2,
    )
    assert (
        result.stdout == ""
        and result.stderr.startswith("error: ")
        and result.stderr.count("\n") == 1
        and words in result.stderr
    ), result.output
    assert list(tmp_path.iterdir()) == []


def test_a_model_by_two_names_is_one_model(tmp_path, place, model):
    (tmp_path / "link").symlink_to(model())
    result = run(
        "barrier",
        model(),
        tmp_path / "link",
        "--task",
        "clm",
        "--data",
        place / "text.txt",
        "--out",
        tmp_path / "out",
        expect=2,
    )
    assert "link is given twice" in result.stderr


# merges whose heads have twice the size


def test_the_line_between_merges_by_circuits(place, model, measure):
    """Saved and loaded again, which only symmerge can; merged at 0 such a model is its parent."""
    folders = {t: place / f"circuits-{t}" for t in (0, 0.25, 0.5, 0.75)}
    for t, folder in folders.items():
        run(
            "merge",
            model(),
            model(seed=1),
            "-t",
            t,
            "--method",
            "none",
            "--attention",
            "circuits",
            "--out",
            folder,
        )
    record, _ = measure("circuits", folders[0.25], folders[0.75], method="none")
    losses = [point["loss"] for point in record["methods"][0]["points"]]
    task, (low, high, parent, start, other) = task_of(
        place, folders[0.25], folders[0.75], model(), folders[0], model(seed=1)
    )
    assert not low.stock and parent.stock
    assert [losses[0], losses[-1]] == [alone(task, end)["loss"] for end in (low, high)]
    assert (
        abs(losses[0] - losses[-1]) > 1e-3
        and abs(losses[0] - alone(task, sm.average(parent, other, 0.25))["loss"]) > 1e-4
    )  # no average of factors
    assert alone(task, start)["loss"] == pytest.approx(alone(task, parent)["loss"], rel=1e-5)
    both, _ = measure("both", model(), model(seed=1), method="none", more=("--circuits",))
    factors, circuits = (method["points"][1]["loss"] for method in both["methods"])
    task, (half,) = task_of(place, folders[0.5])
    assert circuits == pytest.approx(alone(task, half)["loss"], rel=1e-5)
    assert abs(factors - circuits) > 1e-4


# report


def test_pages_of_both_kinds_of_folders(two, three, place, model, tmp_path):
    run("align", model(), model(seed=1), "--recipe", "orthogonal", "--out", place / "aligned")
    pages = {}
    for folder in (two[1], three[1], place / "aligned"):
        out = tmp_path / f"{folder.name}.html"
        assert run("report", folder, "--out", out).stdout == f"wrote {out}\n"
        pages[folder.name] = out.read_text("utf-8")
    for name, kind in (("two", "permutation of 48"), ("aligned", "rotation of 48")):
        assert f"residual: {kind}" in pages[name] and re.search(
            r'<svg[^>]*aria-labelledby="s1-objective0-title', pages[name]
        )
    assert (
        "Structure of the alignment" not in pages["three"]
        and "on average over 3 pairs" in pages["three"]
    )
    result = run("report", place / "text.txt", "--out", tmp_path / "x.html", expect=2)
    assert "is not a folder" in result.stderr and not (tmp_path / "x.html").exists()


# train, and what becomes of what was trained


@pytest.fixture(scope="module")
def trained(place):
    """Two seeds of a tiny ViT and of a tiny GPT-2, by the verb."""
    sizes = {
        "vit-digits": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
        "gpt2-docs": {"n_embd": 16, "n_head": 2, "n_inner": 24, "n_positions": 64},
    }
    tiny = {
        name: replace(
            recipes.TRAINING[name],
            config={**recipes.TRAINING[name].config, **size},
            schedule=recipes.Schedule(3, 4, 1e-3, 1, 0.1),
        )
        for name, size in sizes.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "TRAINING", tiny)
        said = {
            (name, seed): run(
                "train", name, "--seed", seed, "--out", place / f"{name}-{seed}"
            ).stdout
            for name in tiny
            for seed in (0, 1)
        }
        run("train", "vit-digits", "--out", place / "vit-digits-0", expect=2)  # it is there
        unknown = run("train", "magic", "--out", place / "magic", expect=2).stderr
    assert (
        unknown.startswith("error: no training recipe called 'magic': choose one of ")
        and not (place / "magic").exists()
    )
    return lambda name: [place / f"{name}-{seed}" for seed in (0, 1)], said


def test_training_by_the_verb(trained, place):
    folders, said = trained
    (first, second), out = folders("gpt2-docs"), said["gpt2-docs", 1]
    assert (
        out.startswith(f"wrote {second}: ")
        and len(json.loads((second / "metrics.json").read_text())["losses"]) == 3
    )
    assert sm.load(first).digest() != sm.load(second).digest()


def test_a_merged_language_model_writes(trained, place):
    folders, _ = trained
    out = place / "merged-text"
    run("merge", *folders("gpt2-docs"), "--recipe", "orthogonal", "--out", out)
    tokenizer, merged = (
        AutoTokenizer.from_pretrained(out),
        AutoModelForCausalLM.from_pretrained(out),
    )
    prompt = tokenizer("The", return_tensors="pt")
    with torch.no_grad():
        logits = merged(**prompt).logits
        parents = [
            AutoModelForCausalLM.from_pretrained(folder)(**prompt).logits
            for folder in folders("gpt2-docs")
        ]
    assert (
        merged.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False).shape[1]
        == prompt["input_ids"].shape[1] + 4
    )
    assert torch.allclose(
        logits, full_module(sm.load(out), torch.float32)(**prompt).logits, atol=1e-5
    )
    assert not any(torch.allclose(logits, parent, atol=1e-3) for parent in parents)


def test_a_merged_image_model_sees(model, tmp_path):
    """In the stock pipeline, as a picture in colour."""
    parents = model("vit"), model("vit", seed=1)
    run("merge", *parents, "--recipe", "permutations", "--out", tmp_path / "merged")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    scores = [
        {
            row["label"]: row["score"]
            for row in pipeline("image-classification", model=str(folder))(image, top_k=5)
        }
        for folder in (tmp_path / "merged", *parents)
    ]
    assert all(
        len(found) == 5 and sum(found.values()) == pytest.approx(1, abs=1e-4) for found in scores
    )
    assert all(abs(scores[0]["LABEL_0"] - parent["LABEL_0"]) > 1e-3 for parent in scores[1:])


def test_a_merge_of_trained_image_models(trained, tmp_path):
    """Its loss as a stock model with its own processor is that of barrier's midpoint."""
    folders, _ = trained
    measured = (
        "--task",
        "image",
        "--data",
        "digits",
        "--samples",
        8,
        "--points",
        3,
        "--out",
        tmp_path / "curve",
        "--json",
    )
    curve = json.loads(
        run("barrier", *folders("vit-digits"), "--method", "permutations", *measured).stdout
    )["methods"][0]["points"]
    run("merge", *folders("vit-digits"), "--recipe", "permutations", "--out", tmp_path / "merged")
    stock = AutoModelForImageClassification.from_pretrained(tmp_path / "merged")
    found = make_task("image", "digits", [sm.load(tmp_path / "merged")], samples=8).evaluate(stock)
    assert (
        found["loss"] == pytest.approx(curve[1]["loss"], rel=1e-5)
        and abs(found["loss"] - curve[0]["loss"]) > 1e-4
    )
