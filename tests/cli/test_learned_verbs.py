"""Learned and soft matching on the command line: refusals, Ctrl-C, several processes."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from fixtures import checkpoint, run

import symmerge as sm

LEARN = (
    "--method",
    "learned",
    "--data",
    "self",
    "--samples",
    8,
    "--start-from",
    "weights",
    "--tries",
    1,
    "--steps",
    4,
    "--batch-size",
    2,
)


def solution(folder):
    return json.loads((folder / "solution.json").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("saved"), {}

    def save(name, seed=0):
        if (name, seed) not in made:
            made[name, seed] = checkpoint(root / f"{name}-{seed}", name, seed=seed)
        return made[name, seed]

    return save


@pytest.fixture(scope="module")
def pair(saved):
    return saved("gpt2"), saved("gpt2", seed=1)


def test_align_learns_and_says_what_it_did(pair, tmp_path):
    said = run("align", *pair, "--out", tmp_path / "out", *LEARN).stdout
    found = solution(tmp_path / "out")
    assert (
        "loss of the midpoint on held-out inputs" in said
        and found["settings"]["learned"]["steps"] == 4
    )
    assert (
        found["settings"]["data"]["data"] == "self"
        and found["settings"]["start"]["generate_text"] is True
    )
    for parent, written in zip(pair, ("reference", "aligned"), strict=True):
        assert sm.verify(sm.load(parent), sm.load(tmp_path / "out" / written)).same
    assert not list(tmp_path.glob("*.partial*"))
    assert (
        sm.verify(sm.load(pair[0]), sm.load(tmp_path / "out" / "aligned")).same is False
    )  # the control


def test_language_models_need_no_data(pair, tmp_path):
    run(
        "align",
        *pair,
        "--out",
        tmp_path / "out",
        *(word for word in LEARN if word not in ("--data", "self")),
    )
    assert solution(tmp_path / "out")["settings"]["data"]["data"] == "self"


def test_merge_learns(pair, tmp_path):
    run("merge", *pair, "--out", tmp_path / "out", *LEARN, "--spaces", "vo,residual")
    card = json.loads((tmp_path / "out" / "symmerge.json").read_text())
    assert "all steps done" in json.dumps(card)


def test_permutations_only_is_the_published_recipe(pair, tmp_path):
    run(
        "align",
        *pair,
        "--out",
        tmp_path / "out",
        *(word for word in LEARN if word not in ("--start-from", "weights")),
        "--permutations-only",
    )
    found = solution(tmp_path / "out")
    assert "learned permutations" in found["recipe"] and found["settings"]["target"] == "labels"


def test_soft_is_hardened_before_it_is_written(pair, tmp_path):
    words = [word for word in LEARN if word != "learned"]
    words.insert(1, "soft")
    run("align", *pair, "--out", tmp_path / "out", *words)
    assert (
        solution(tmp_path / "out")["settings"]["soft"]["end"]["function"] > 1e-4
    )  # what it would be without
    assert sm.verify(sm.load(pair[1]), sm.load(tmp_path / "out" / "aligned")).same


def test_barriers_of_parts_that_are_learned(pair, tmp_path):
    lines = "none,learned:residual,learned:vo+qk,soft"
    words = (
        "--task",
        "clm",
        "--data",
        "self",
        "--samples",
        4,
        "--points",
        3,
        "--steps",
        2,
        "--calibration",
        "self",
        "--calibration-samples",
        8,
    )
    run("barrier", *pair, "--out", tmp_path / "out", "--method", lines, *words)
    record = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert [method["name"] for method in record["methods"]] == lines.split(",")
    labels = [method["label"] for method in record["methods"]]
    assert labels[1].startswith("learned matching") and labels[3].endswith("(no symmetry)")


def test_merge_repairs_on_request_and_says_so(pair, tmp_path):
    words = ("merge", *pair, "--tries", 1, "--calibration", "self")
    said = run(*words, "--out", tmp_path / "repaired", "--repair", "norms").stdout
    assert re.search(r"repaired norms: loss \d.* before, \d.* after", said)
    assert "repair" in (tmp_path / "repaired" / "symmerge.json").read_text()
    for extra, wrong in (
        (("--repair", "tyres"), "--repair tyres: choose maps or norms"),
        (("--repair", "maps", "--attention", "circuits"), "makes none"),
    ):
        assert wrong in run(*words, "--out", tmp_path / "none", *extra, expect=2).stderr
    assert (
        "give --calibration"
        in run("merge", *pair, "--out", tmp_path / "none", "--repair", "maps", expect=2).stderr
    )


REFUSED = {
    "no inputs": (
        "bert-classifier",
        ("--method", "learned"),
        "learning needs something to learn from: give --data",
    ),
    "own text of a classifier": (
        "bert-classifier",
        ("--method", "learned", "--data", "self"),
        "no inputs can be generated for the task text",
    ),
    "steps without learning": (
        "gpt2",
        ("--steps", 5),
        "--steps 5: weights learns nothing; add --method learned",
    ),
    "no such space": (
        "gpt2",
        (*LEARN, "--spaces", "tail"),
        "this model has no part called 'tail': choose one of ff, heads, residual",
    ),
    "no such sampler": (
        "gpt2",
        (*LEARN, "--sampler", "dice"),
        "no sampler called 'dice': choose one of narrow",
    ),
    "no such start": (
        "gpt2",
        ("--method", "learned", "--start-from", "luck"),
        "--start-from luck: choose weights, activations or identity",
    ),
    "no such target": (
        "gpt2",
        (*LEARN, "--target", "luck"),
        "--target luck: choose auto, parents, author, bayes or labels",
    ),
    "two recipes": (
        "gpt2",
        ("--permutations-only", "--recipe", "orthogonal"),
        "--permutations-only is a recipe of --method learned",
    ),
    "statistics for learning": (
        "gpt2",
        (*LEARN, "--score", "cosine"),
        "--score cosine: only --method activations takes it",
    ),
    "patience for soft": (
        "gpt2",
        ("--method", "soft", "--patience", 3),
        "--patience 3: only --method learned takes it",
    ),
    "soft is no symmetry": ("gpt2", ("--recipe", "soft"), "recipe soft is not a symmetry"),
    "one sample": (
        "gpt2",
        (*LEARN[:-6], "--samples", 1, "--steps", 1),
        "too few to learn from and to evaluate on",
    ),
    "no GPU": ("gpt2", (*LEARN, "--device", "cuda:99"), "PyTorch sees"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(saved, tmp_path, case):
    model, words, said = REFUSED[case]
    result = run(
        "align", saved(model), saved(model, seed=1), "--out", tmp_path / "out", *words, expect=2
    )
    assert (
        said in result.stderr
        and len(result.stderr.strip().splitlines()) >= 1
        and not (tmp_path / "out").exists()
    )


def test_several_processes_learn_together(pair, tmp_path):
    learn = ["identity" if word == "weights" else word for word in LEARN]
    words = [str(word) for word in ("align", *pair, "--out", tmp_path / "out", *learn)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "symmerge",
        *words,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    run("align", *pair, "--out", tmp_path / "alone", *learn, "--accumulate", 2)
    together, alone = (solution(tmp_path / folder)["objective"] for folder in ("out", "alone"))
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=1e-4, atol=1e-5)
