"""Statistics files that cannot be used: one line and a remedy; only our own are replaced."""

import json
import os
from pathlib import Path

import pytest
import torch
from fixtures import checkpoint, run
from observed_pairs import inputs, pair_statistics
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import symmerge as sm
from symmerge.errors import SymmergeError
from symmerge.lab.small_models import small_model
from symmerge.matching.activations import ActivationMatching
from symmerge.observation.statistics import Statistics

REMEDY = "make it again with symmerge statistics"


@pytest.fixture(scope="module")
def pair():
    return tuple(
        sm.canonicalize(sm.load(small_model("gpt2", seed=seed, dtype=torch.float64)))
        for seed in (0, 1)
    )


@pytest.fixture(scope="module")
def good(pair, tmp_path_factory):
    """A file, its header and its tensors."""
    file = tmp_path_factory.mktemp("statistics") / "good.safetensors"
    pair_statistics(*pair, inputs(pair[0], 1)).save(file)
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["symmerge"])
    return file, header, load_file(file)


def first(tensors, part):
    return next(name for name in tensors if name.endswith(f"/{part}"))


def changed(part, change):
    """A tensor changed in the first activation."""

    def damage(header, tensors):
        name = first(tensors, part)
        return header, {**tensors, name: change(tensors[name].clone()).contiguous()}

    return damage


def headed(**changes):
    return lambda header, tensors: ({**header, **changes}, tensors)


def inside_header(**changes):
    return lambda header, tensors: ({**header, "header": {**header["header"], **changes}}, tensors)


def axis(value):
    def damage(header, tensors):
        name = next(iter(header["axes"]))
        return {**header, "axes": {**header["axes"], name: value}}, tensors

    return damage


DAMAGES = {
    "sums too short": changed("sum_a", lambda sums: sums[1:]),
    "squares of another shape": changed("square_b", lambda sums: sums[:, None]),
    "a count with an axis": changed("count", lambda count: count[None]),
    "products as a vector": changed("cross", lambda cross: cross.flatten()),
    "products inside heads, flat": changed("inside", lambda inside: inside.flatten()),
    "heads that do not fit": changed("inside", lambda inside: torch.zeros(2, 3, 3).double()),
    "float32": changed("cross", lambda cross: cross.float()),
    "whole numbers": changed("count", lambda count: count.long()),
    "complex": changed("cross", lambda cross: cross.to(torch.complex64)),
    "NaN": changed("cross", lambda cross: cross.fill_(torch.nan)),
    "infinite": changed("square_a", lambda squares: squares.fill_(torch.inf)),
    "no samples": changed("count", lambda count: count * 0),
    "fewer than none": changed("count", lambda count: -count),
    "negative squares": changed("square_a", lambda squares: -squares - 1),
    "axes as a list": headed(axes=[1, 2]),
    "axes as text": headed(axes="ff"),
    "no axes": headed(axes={}),
    "an axis that is a number": axis(5),
    "an axis that is empty": axis(""),
    "an axis that does not parse": axis("((("),
    "header as a list": headed(header=[]),
    "header missing": headed(header=None),
    "steps as a number": inside_header(steps=3),
    "models as numbers": inside_header(a=1),
    "batches as text": inside_header(batches="many"),
    "inputs of wrong types": inside_header(inputs=[{"name": 3}]),
    "inputs deep": inside_header(inputs=[[[[[]]]]]),
    "unknown keys": inside_header(colour="red"),
    "another format": headed(format="symmerge.alignment/1"),
}


def damaged(good, tmp_path, damage):
    header, tensors = damage(*good[1:])
    save_file(tensors, tmp_path / "s", {"symmerge": json.dumps(header)})
    return tmp_path / "s"


@pytest.mark.parametrize("how", DAMAGES)
def test_wrong_contents_are_refused_when_they_are_read(good, tmp_path, how):
    file = damaged(good, tmp_path, DAMAGES[how])
    with pytest.raises(SymmergeError) as caught:
        Statistics.load(file)
    line = str(caught.value)
    assert str(file) in line and REMEDY in line and "\n" not in line and len(line) < 500


HEADERS = {
    "not JSON": "{",
    "no object": "[]",
    "deep": "[" * 100_000,
    "thousands of digits": '{"format": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("how", HEADERS)
def test_headers_that_do_not_parse(good, tmp_path, how):
    save_file(good[2], tmp_path / "s", {"symmerge": HEADERS[how]})
    with pytest.raises(SymmergeError, match=REMEDY):
        Statistics.load(tmp_path / "s")


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(SymmergeError, match=REMEDY):
            Statistics.load(file)


def renamed(header, tensors):
    """Activations of a tensor that the model does not have."""
    old = next(iter(header["axes"]))
    axes = {("x:in" if name == old else name): axis for name, axis in header["axes"].items()}
    return {**header, "axes": axes}, {
        name.replace(f"{old}/", "x:in/"): tensor for name, tensor in tensors.items()
    }


def narrower(header, tensors):
    """Sums of consistent shapes, but of fewer coordinates than the model has."""
    name = next(iter(header["axes"]))
    cut = {
        "cross": lambda cross: cross[1:, 1:].contiguous(),
        "inside": lambda _: torch.zeros(0, 0, 0).double(),
    }
    cut |= dict.fromkeys(("sum_a", "sum_b", "square_a", "square_b"), lambda sums: sums[1:])
    for part, change in cut.items():
        tensors = {**tensors, f"{name}/{part}": change(tensors[f"{name}/{part}"]).clone()}
    return header, tensors


FOREIGN = {
    "another tensor": renamed,
    "fewer coordinates": narrower,
    "another space": axis("nowhere"),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_activations_that_the_model_lacks(pair, good, tmp_path, how):
    loaded = Statistics.load(damaged(good, tmp_path, FOREIGN[how]))
    with pytest.raises(SymmergeError, match=f"do not fit the model.*{REMEDY}"):
        ActivationMatching(statistics=loaded).solve(*pair)
    with pytest.raises(SymmergeError, match="other activations"):
        Statistics.load(good[0]) + loaded


def test_the_same_file_undamaged(pair, good, tmp_path):
    """The control of all tests above."""
    loaded = Statistics.load(damaged(good, tmp_path, lambda *content: content))
    assert loaded.samples
    assert (loaded + loaded).samples == 2 * loaded.samples
    ActivationMatching(statistics=loaded).probe(*pair, lambda _: None)


# what is replaced


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return tuple(checkpoint(root / str(seed), "gpt2", seed=seed) for seed in (0, 1))


def foreign_tensors(file):
    save_file({"a": torch.zeros(2)}, file, {"symmerge": json.dumps({"format": "other"})})


THEIRS = {
    "a text": lambda file: file.write_text("mine"),
    "a text with our mark": lambda file: file.write_text("symmerge.statistics/1"),
    "weights": lambda file: save_file({"a": torch.zeros(2)}, file),
    "another file of ours": foreign_tensors,
    "an empty file": lambda file: file.touch(),
    "a folder": lambda file: file.mkdir(),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("what", THEIRS)
def test_overwrite_replaces_only_statistics(models, tmp_path, what):
    out = tmp_path / "s.safetensors"
    THEIRS[what](out)
    before = out.read_bytes() if out.is_file() else None
    options = (
        *models,
        "--calibration",
        "python-docs",
        "--calibration-samples",
        2,
        "--out",
        out,
        "--overwrite",
    )
    said = " ".join(run("statistics", *options, expect=2).output.split())
    assert "exists, but is not a symmerge.statistics/1 file" in said
    assert (out.read_bytes() if out.is_file() else None) == before
    assert os.listdir(tmp_path) == [out.name]


def test_overwrite_replaces_statistics(models, tmp_path):
    """The control: a file of ours is replaced, and only if asked."""
    out = tmp_path / "s.safetensors"
    options = (*models, "--calibration", "python-docs", "--out", out)
    run("statistics", *options, "--calibration-samples", 2)
    small = Statistics.load(out).samples
    run("statistics", *options, "--calibration-samples", 4, expect=2)
    assert Statistics.load(out).samples == small
    run("statistics", *options, "--calibration-samples", 4, "--overwrite")
    assert Statistics.load(out).samples == 2 * small
