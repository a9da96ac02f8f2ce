"""Activations on the command line: refusals, interrupted passes, several processes."""

import json
import os
import signal
from functools import cache
from pathlib import Path

import pytest
import torch
from fixtures import checkpoint, run, tokenizer
from processes import run_in_two
from transformers import PreTrainedTokenizerFast

import symmerge as sm
from symmerge.aligning import pair as aligning
from symmerge.cli import statistics as verb
from symmerge.observation.gathering import Gatherer
from symmerge.observation.moments import SUMS
from symmerge.observation.statistics import Statistics

TEXTS = {
    "text.txt": "The loss on the line, and what alignment leaves of it. " * 200,
    "other.txt": "Another text, 0 to 9, with other words in it. " * 200,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("activation-verbs")
    for name, text in TEXTS.items():
        (root / name).write_text(text)
    rows = "".join(
        f"{number % 3}\t{'ab'[number % 2]} few words {number * 7}\n" for number in range(80)
    )
    (root / "rows.tsv").write_text(f"label\ttext\n{rows}")
    return root


@pytest.fixture(scope="module")
def pair(place):
    @cache
    def make(name="gpt2", **changes):
        return [
            checkpoint(place / "-".join([name, str(seed), *changes]), name, seed=seed, **changes)
            for seed in (0, 1)
        ]

    return make


# arguments after `align A B --out OUT` -> what the line must say; {place} is where the texts are
REFUSED = {
    "no data, a language model": (
        "gpt2",
        ("--method", "activations"),
        "give --calibration: a text file, python-docs:train or hf:NAME; or self",
    ),
    "no data, images": (
        "vit",
        ("--method", "activations"),
        "give --calibration: digits:train, an .npz file, a folder",
    ),
    "no data, a recipe": (
        "bert-classifier",
        ("--recipe", "correlation"),
        "give --calibration: a TSV, CSV or JSONL file",
    ),
    "classifiers of texts write nothing": (
        "bert-classifier",
        ("--method", "activations", "--data", "self"),
        "no inputs can be generated for the task text",
    ),
    "recipe against method": (
        "gpt2",
        ("--method", "weights", "--recipe", "correlation"),
        "--recipe correlation is for --method activations, not weights",
    ),
    "method against recipe": (
        "gpt2",
        ("--method", "activations", "--recipe", "symmerge"),
        "choose one of activations, activations-untied, correlation",
    ),
    "data that is not there, for weights": (
        "gpt2",
        ("--data", "nowhere.txt"),
        "nowhere.txt does not exist",
    ),
    "something to look at, for weights": (
        "gpt2",
        ("--calibration", "{place}/text.txt"),
        "does not look at activations; add --method activations",
    ),
    "samples of nothing": (
        "gpt2",
        ("--method", "activations", "--calibration-samples", 4),
        "there is nothing to take them from; add --calibration",
    ),
    "score for weights": (
        "gpt2",
        ("--score", "cosine"),
        "--score cosine: only --method activations takes it",
    ),
    "unknown score": (
        "gpt2",
        ("--method", "activations", "--data", "self", "--score", "l1"),
        "--score l1: choose correlation, absolute, cosine, covariance or product",
    ),
    "no symmetry": (
        "gpt2",
        ("--recipe", "residual-separate", "--data", "self"),
        "residual-separate is not a symmetry: its result is not the function",
    ),
    "data that is not there": (
        "gpt2",
        ("--recipe", "correlation", "--data", "nowhere.txt"),
        "nowhere.txt does not exist",
    ),
    "data too short": (
        "gpt2",
        ("--recipe", "correlation", "--data", "{place}/text.txt", "--samples", 9999),
        "9999 needed: ask for fewer samples",
    ),
    "no statistics": (
        "gpt2",
        ("--recipe", "correlation", "--statistics", "{place}/text.txt"),
        "text.txt is not a statistics file",
    ),
}


@pytest.mark.parametrize("verb", ["align", "merge"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_work(place, pair, tmp_path, monkeypatch, verb, case):
    name, arguments, words = REFUSED[case]
    monkeypatch.setattr(aligning, "solve_pair", lambda *_, **__: pytest.fail("it began to work"))
    result = run(
        verb,
        *pair(name),
        "--out",
        tmp_path / "out",
        *(str(one).format(place=place) for one in arguments),
        expect=2,
    )
    assert (
        result.stdout == ""
        and result.stderr.startswith("error: ")
        and result.stderr.count("\n") == 1
        and words in result.stderr
    ), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_plain_average_has_no_recipe(pair, tmp_path):
    assert (
        "leave out --recipe correlation"
        in run(
            "merge",
            *pair(),
            "--method",
            "none",
            "--recipe",
            "correlation",
            "--out",
            tmp_path / "x",
            expect=2,
        ).stderr
    )


def test_a_recipe_implies_its_method_and_a_method_its_recipe(place, pair, tmp_path):
    record = {}
    for name, arguments in {
        "method": ("--method", "activations", "--tries", 2),
        "recipe": ("--recipe", "correlation"),
    }.items():
        run(
            "align",
            *pair(),
            *arguments,
            "--data",
            place / "text.txt",
            "--samples",
            8,
            "--out",
            tmp_path / name,
        )
        record[name] = json.loads((tmp_path / name / "solution.json").read_text())
        assert record[name]["settings"]["data"]["samples"] == 8
        run("verify", pair()[1], tmp_path / name / "aligned")
    assert (
        "ours with data" in record["method"]["recipe"]
        and "correlation of activations" in record["recipe"]["recipe"]
    )
    assert (
        record["method"]["settings"]["scored_on"] == "held-out data"
        and record["recipe"]["settings"]["scored_on"] == "the objective"
    )


def test_own_text_needs_no_data_and_a_score_is_kept(pair, tmp_path):
    run(
        "align",
        *pair(),
        "--method",
        "activations",
        "--data",
        "self",
        "--samples",
        8,
        "--tries",
        3,
        "--score",
        "cosine",
        "--out",
        tmp_path / "out",
    )
    tried = json.loads((tmp_path / "out/solution.json").read_text())["trials"]
    assert len(tried) == 3 and {one["weighting"]["score"] for one in tried} == {"cosine"}


def test_warnings_reach_a_pipe(place, pair, tmp_path):
    few = ("align", *pair(), "--recipe", "correlation", "--data", place / "text.txt", "--samples")
    assert run(*few, 1, "--out", tmp_path / "few").stderr == (
        "warning: 64 tokens for spaces of up to 96 coordinates:"
        " correlations are mostly chance; give 192 or more\n"
    )
    assert run(*few, 3, "--out", tmp_path / "enough").stderr == ""  # the control


# statistics


def sums(file):
    return {
        f"{name}/{part}": getattr(found, part)
        for name, found in Statistics.load(file).moments.items()
        for part in SUMS
    }


def apart(first, second):
    """The largest relative difference of two files of sums."""
    a, b = sums(first), sums(second)
    assert list(a) == list(b)
    return max(((a[name] - b[name]).norm() / a[name].norm().clamp_min(1e-30)).item() for name in a)


def test_statistics_are_gathered_once_and_used_often(place, pair, tmp_path):
    arguments = ("--calibration", place / "text.txt", "--calibration-samples", 8)
    said = run(
        "statistics", *pair(), *arguments, "--recipe", "correlation", "--out", tmp_path / "s"
    )
    assert (
        said.stdout.startswith(f"wrote {tmp_path / 's'}: 512 tokens, ")
        and Statistics.load(tmp_path / "s").samples == 512
    )
    run("align", *pair(), "--recipe", "correlation", *arguments, "--out", tmp_path / "straight")
    run(
        "align",
        *pair(),
        "--recipe",
        "correlation",
        "--statistics",
        tmp_path / "s",
        "--out",
        tmp_path / "again",
    )
    first, second = (
        (tmp_path / name / "aligned/model.safetensors").read_bytes()
        for name in ("straight", "again")
    )
    assert first == second
    for models, recipe, words in (
        (pair()[::-1], "correlation", "model A is another"),
        (pair(), "activations", "in another form (spec differs)"),
    ):
        refused = run(
            "align",
            *models,
            "--recipe",
            recipe,
            "--statistics",
            tmp_path / "s",
            "--out",
            tmp_path / "x",
            expect=2,
        )
        assert words in refused.stderr and refused.stderr.count("\n") == 1


def test_files_are_added_up(place, pair, tmp_path):
    for text in TEXTS:
        run(
            "statistics",
            *pair(),
            "--calibration",
            place / text,
            "--calibration-samples",
            4,
            "--out",
            tmp_path / text,
        )
    run(
        "statistics",
        *pair(),
        "--add",
        tmp_path / "text.txt",
        "--add",
        tmp_path / "other.txt",
        "--out",
        tmp_path / "both",
    )
    run(
        "statistics",
        *pair(),
        "--calibration",
        place / "text.txt",
        "--calibration-samples",
        4,
        "--add",
        tmp_path / "other.txt",
        "--out",
        tmp_path / "at once",
    )
    parts = [sums(tmp_path / text) for text in TEXTS]
    assert all(
        torch.equal(value, parts[0][name] + parts[1][name])
        for name, value in sums(tmp_path / "both").items()
    )
    assert (
        apart(tmp_path / "both", tmp_path / "at once") <= 1e-12
        and apart(tmp_path / "both", tmp_path / "text.txt") > 0.1
    )
    assert len(Statistics.load(tmp_path / "both").header.inputs) == 2


REFUSED_STATISTICS = {
    "nothing": ((), "nothing to gather: give --calibration"),
    "it is there": (
        ("--calibration", "{place}/text.txt", "--out", "{place}/text.txt"),
        "text.txt exists: choose another --out, or add --overwrite",
    ),
    "a recipe of weights": (
        ("--calibration", "{place}/text.txt", "--recipe", "orthogonal"),
        "--recipe orthogonal does not look at activations",
    ),
    "no file to add": (("--add", "{place}/text.txt"), "text.txt is not a statistics file"),
}


@pytest.mark.parametrize("case", REFUSED_STATISTICS)
def test_statistics_refused(place, pair, tmp_path, monkeypatch, case):
    arguments, words = REFUSED_STATISTICS[case]
    monkeypatch.setattr(verb, "gather_pair", lambda *_, **__: pytest.fail("it began to work"))
    given = [one.format(place=place) for one in arguments]
    result = run(
        "statistics",
        *pair(),
        *given,
        *(() if "--out" in given else ("--out", tmp_path / "out")),
        expect=2,
    )
    assert (
        words in result.stderr and result.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
    )


def test_models_that_read_differently_are_refused(place, pair, tmp_path):
    """By a word of the vocabulary, or by how text is split; equal files are the control."""
    a = pair()[0]
    other = checkpoint(tmp_path / "other", "gpt2", seed=1)
    gather = (
        "statistics",
        a,
        other,
        "--calibration",
        place / "text.txt",
        "--calibration-samples",
        2,
        "--overwrite",
        "--out",
        tmp_path / "s",
    )
    run(*gather)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    said = run(*gather, expect=2).stderr
    assert (
        f"the tokenizers of {a} and {other} differ ('a' is 5 in one, 6 in the other)" in said
        and said.count("\n") == 1
    )
    backend = tokenizer().backend_tokenizer
    backend.post_processor = None
    PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]").save_pretrained(other)
    assert "post_processor in tokenizer.json" in run(*gather, expect=2).stderr
    assert (
        "differ"
        in run(
            "align",
            a,
            other,
            "--recipe",
            "correlation",
            "--data",
            place / "text.txt",
            "--out",
            tmp_path / "x",
            expect=2,
        ).stderr
    )


# an interrupted pass


def stopped(monkeypatch, at):
    """A signal in the middle of one batch, between the two models' passes; later passes go on."""
    whole, calls = Gatherer._add, []

    def add(self, name, axis, a, b):
        calls.append(name)
        if (
            calls.count(name) == at
            and len(set(calls)) == len(self.moments)
            and calls[-1] == list(self.moments)[3]
        ):
            os.kill(os.getpid(), signal.SIGINT)
        whole(self, name, axis, a, b)

    monkeypatch.setattr(Gatherer, "_add", add)


@pytest.fixture
def interruptible():
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where tests run in the background
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_pass_goes_on(place, pair, tmp_path, monkeypatch, interruptible):
    gather = (
        "statistics",
        *pair(),
        "--calibration",
        place / "text.txt",
        "--calibration-samples",
        160,
        "--out",
    )
    run(*gather, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stopped(patch, at=2)
        said = run(*gather, tmp_path / "out", expect=130)
    assert (
        said.stderr
        == "interrupted: what was gathered so far is saved, --resume continues from it\n"
    )
    kept = tmp_path / "out.partial"
    assert Statistics.load(kept).header.batches == 2 and not (tmp_path / "out").exists()
    assert (
        len({int(found.count) for found in Statistics.load(kept).moments.values()}) == 1
    )  # whole batches only
    batches = []
    with monkeypatch.context() as patch:
        whole = Gatherer.add_batch
        patch.setattr(
            Gatherer, "add_batch", lambda self, inputs: batches.append(1) or whole(self, inputs)
        )
        run(*gather, tmp_path / "out", "--resume")
    assert len(batches) == 3 and not kept.exists()
    assert (tmp_path / "out").read_bytes() == (tmp_path / "straight").read_bytes()


def test_what_another_pass_left_is_not_taken_up(place, pair, tmp_path, monkeypatch, interruptible):
    gather = (
        "statistics",
        *pair(),
        "--calibration-samples",
        160,
        "--out",
        tmp_path / "out",
        "--calibration",
    )
    with monkeypatch.context() as patch:
        stopped(patch, at=2)
        run(*gather, place / "text.txt", expect=130)
    assert (
        "was left by a pass over other models or other data"
        in run(*gather, place / "text.txt", "--seed", 1, "--resume", expect=2).stderr
    )
    run(*gather, place / "text.txt", "--seed", 1)  # from the beginning
    assert not (tmp_path / "out.partial").exists()


def test_align_goes_on_from_an_interrupted_pass(place, pair, tmp_path, monkeypatch, interruptible):
    align = (
        "align",
        *pair(),
        "--recipe",
        "correlation",
        "--data",
        place / "text.txt",
        "--samples",
        130,
        "--out",
    )
    run(*align, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stopped(patch, at=2)
        said = run(*align, tmp_path / "out", expect=130)
    assert "--resume continues from it" in said.stderr
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("out")] == [
        "out.statistics.partial.safetensors"
    ]
    run(*align, tmp_path / "out", "--resume")
    assert not (tmp_path / "out.statistics.partial.safetensors").exists()
    first, second = (
        (tmp_path / name / "aligned/model.safetensors").read_bytes() for name in ("straight", "out")
    )
    assert first == second


# several processes


@pytest.mark.parametrize("samples", [160, 32])
def test_two_processes_find_what_one_does(place, pair, tmp_path, samples):
    """Five batches for two processes; and one, so that the second has nothing to do."""
    gather = (
        "statistics",
        *pair(),
        "--calibration",
        place / "text.txt",
        "--calibration-samples",
        samples,
        "--out",
    )
    run(*gather, tmp_path / "one")
    said = run_in_two(*gather, tmp_path / "two", folder=tmp_path)
    assert said.count("wrote ") == 1
    assert apart(tmp_path / "one", tmp_path / "two") <= 1e-6
    assert Statistics.load(tmp_path / "one").header == Statistics.load(tmp_path / "two").header


# barrier


def measured(place, pair, out, *more, expect=0, data="text.txt", name="gpt2"):
    task = {"gpt2": "clm", "bert": "mlm"}[name]
    given = (
        "--task",
        task,
        "--data",
        place / data if data != "self" else data,
        "--samples",
        4,
        "--points",
        3,
        "--out",
        out,
        "--json",
    )
    return run("barrier", *pair(name), *given, *more, expect=expect)


def test_lines_by_activations_and_by_what_is_no_symmetry(place, pair, tmp_path):
    methods = "none,activations,correlation,correlation-ignore-heads"
    more = ("--method", methods, "--calibration", place / "other.txt", "--calibration-samples", 8)
    record = json.loads(measured(place, pair, tmp_path / "out", *more, name="bert").stdout)
    plain, ours, published, torn = (
        [point["loss"] for point in method["points"]] for method in record["methods"]
    )
    labels = [method["label"] for method in record["methods"]]
    assert labels == [
        "plain average",
        "activation matching",
        "activation matching, correlation",
        "activation matching, correlation-ignore-heads (no symmetry)",
    ]
    assert ours[-1] == pytest.approx(plain[-1], rel=1e-4) and published[-1] == pytest.approx(
        plain[-1], rel=1e-4
    )
    assert abs(torn[-1] - plain[-1]) > 1e-3  # no symmetry: another function at B's end
    assert (
        record["methods"][3]["over"] == [plain[0], plain[-1]] and "over" not in record["methods"][2]
    )
    assert record["methods"][1]["settings"]["data"]["data"] == str(place / "other.txt")


REFUSED_LINES = {
    "no calibration": (
        ("--method", "correlation"),
        "correlation: activations need something to look at: give --calibration: a text file",
    ),
    "what is measured on": (
        ("--method", "correlation", "--calibration", "{place}/../{name}/text.txt"),
        "a merge fitted to it would look better than it is",
    ),
    "nobody looks": (
        ("--method", "none", "--calibration", "self"),
        "none of none looks at activations",
    ),
}


@pytest.mark.parametrize("case", REFUSED_LINES)
def test_lines_refused(place, pair, tmp_path, case):
    arguments, words = REFUSED_LINES[case]
    result = measured(
        place,
        pair,
        tmp_path / "out",
        *(one.format(place=place, name=place.name) for one in arguments),
        expect=2,
    )
    assert (
        words in result.stderr and result.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
    )


def test_own_text_to_calibrate_is_not_the_own_text_to_measure(place, pair, tmp_path):
    record = json.loads(
        measured(
            place,
            pair,
            tmp_path / "out",
            "--method",
            "correlation",
            "--calibration",
            "self",
            data="self",
        ).stdout
    )
    assert record["methods"][0]["settings"]["data"]["seed"] != record["task"]["seed"]


# other kinds of models


@pytest.mark.parametrize("recipe", ["activations", "correlation-classifier"])
def test_classifiers_from_end_to_end(place, pair, tmp_path, recipe):
    models, data = pair("bert-classifier"), ("--data", place / "rows.tsv")
    run(
        "align",
        *models,
        "--recipe",
        recipe,
        *data,
        *(("--tries", 2) if recipe == "activations" else ()),
        "--out",
        tmp_path / "out",
    )
    run("verify", models[1], tmp_path / "out/aligned")
    assert (
        json.loads((tmp_path / "out/solution.json").read_text())["distance_after"]
        < json.loads((tmp_path / "out/solution.json").read_text())["distance_before"]
    )
    pooled = {
        space["space"]
        for space in json.loads((tmp_path / "out/structure.json").read_text())["spaces"]
    }
    assert "pooled" in pooled


def test_images_from_end_to_end(place, pair, tmp_path):
    models = pair("vit", num_labels=10)
    run(
        "merge",
        *models,
        "--method",
        "activations",
        "--data",
        "digits:train",
        "--samples",
        40,
        "--tries",
        2,
        "--out",
        tmp_path / "merged",
    )
    measured = ("--task", "image", "--data", "digits", "--samples", 8, "--points", 3)
    inputs = ("--calibration", "digits:train", "--calibration-samples", 40)
    lines = ("--method", "none,correlation", "--out", tmp_path / "curve")
    run("barrier", *models, *measured, *inputs, *lines)
    assert (
        sm.load(tmp_path / "merged").spec.task == "image-classification"
        and Path(tmp_path / "curve/curve.svg").exists()
    )
