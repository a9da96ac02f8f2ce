"""Aligned folders as input: the same merge as of the alignment itself, and clear refusals."""

import json
import shutil

import pytest
from fixtures import checkpoint, run

import symmerge as sm
from symmerge.aligning.aligned import write_aligned
from symmerge.aligning.many import write_aligned_many
from symmerge.errors import CheckpointError, MismatchError

FAST = "permutations"


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    home = tmp_path_factory.mktemp("seeds")
    return [checkpoint(home / f"seed-{seed}", "gpt2", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def pair(seeds, tmp_path_factory):
    """An alignment in memory, and the folder it was written to."""
    folder = tmp_path_factory.mktemp("pair") / "aligned"
    alignment = sm.align(*seeds[:2], FAST)
    write_aligned(alignment, folder)
    return alignment, folder


@pytest.fixture(scope="module")
def many(seeds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "aligned"
    alignment = sm.align_many(seeds, FAST, reference=1)
    write_aligned_many(alignment, folder)
    return alignment, folder


def difference(a, b):
    return max((a.weights[name] - b.weights[name]).abs().max().item() for name in a.weights)


@pytest.mark.parametrize("kind", ["pair", "many"])
def test_a_folder_merges_as_its_alignment_does(kind, request, seeds, monkeypatch):
    alignment, folder = request.getfixturevalue(kind)
    weights = [0.7, 0.3] if kind == "pair" else [0.5, 0.3, 0.2]
    expected = sm.merge(alignment, weights=weights)
    monkeypatch.setattr("symmerge.merging.pipeline.align_models", None)  # nothing is solved again
    merged = sm.merge(folder, weights=weights)
    assert difference(merged, expected) <= 1e-6
    assert difference(merged, sm.merge(folder, weights=weights[::-1])) > 1e-3  # the control
    step, wanted = merged.history[-1], expected.history[-1]
    assert [one.where for one in step.parents] == [one.where for one in wanted.parents]
    assert [one.sha256 for one in step.parents] == [one.sha256 for one in wanted.parents]
    assert {one.where for one in step.parents} == {str(one) for one in seeds[: len(weights)]}
    assert step.evidence.keys() == wanted.evidence.keys()
    differing = {key for key in step.evidence if step.evidence[key] != wanted.evidence[key]}
    assert differing == {"proved"}
    assert f"all {len(weights)} parents computed" in step.evidence["proved"]


def test_the_command_merges_a_folder(pair, tmp_path):
    _, folder = pair
    said = run("merge", folder, "--out", tmp_path / "merged", "-t", 0.25).stdout
    assert "0.25 x" in said and "parents computed what they did" in said
    wanted = sm.merge(sm.load_aligned(folder), t=0.25)
    assert difference(sm.load(tmp_path / "merged"), wanted) <= 1e-6
    record = json.loads((tmp_path / "merged" / "symmerge.json").read_text())
    assert record["steps"][-1]["parents"][1]["where"].endswith("seed-1")
    said = run("merge", folder, "--out", tmp_path / "x", "--effort", "best", expect=2).stderr
    assert "is already aligned" in said and not (tmp_path / "x").exists()


def test_the_order_is_that_of_the_models(many):
    alignment, folder = many
    opened = sm.load_aligned(folder)
    assert [difference(a, b) for a, b in zip(opened.models, alignment.models, strict=True)] == [
        0.0
    ] * 3
    assert opened.reference is opened.models[1] and len(repr(opened).splitlines()) <= 3


def test_other_folders_are_refused_in_one_line(seeds, pair, tmp_path):
    _, folder = pair
    remedy = "symmerge align A B --out DIR makes one"
    for other, what in ((tmp_path / "gone", "no such folder"), (seeds[0], "a single checkpoint")):
        with pytest.raises(CheckpointError, match=f"is not an aligned folder: .*{what}.*{remedy}"):
            sm.load_aligned(other)
    said = run("merge", seeds[0], "--out", tmp_path / "merged", expect=2).stderr
    assert "there is nothing to merge it with" in said and said.count("\n") == 1
    (tmp_path / "empty").mkdir()
    said = run("merge", tmp_path / "empty", "--out", tmp_path / "merged", expect=2).stderr
    assert "is not an aligned folder" in said and said.count("\n") == 1
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    shutil.rmtree(damaged / "aligned")
    with pytest.raises(CheckpointError, match=f"aligned is missing; {remedy}"):
        sm.load_aligned(damaged)
    shutil.copytree(seeds[1], damaged / "aligned")
    with pytest.raises(CheckpointError, match=r"aligned has no symmerge\.json"):
        sm.load_aligned(damaged)
    (damaged / "solution.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither solution.json nor universe.json"):
        sm.load_aligned(damaged)
    with pytest.raises(MismatchError, match="is already aligned: leave out"):
        sm.merge(folder, method="learned")


# barrier


def measured(*arguments, expect=0):
    return run("barrier", *arguments, "--samples", 4, "--points", 3, expect=expect)


def table(lines):
    header, *rows = (line.split("\t") for line in lines if not line.startswith("# "))
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return file


def test_the_line_of_a_folder_is_measured_as_it_is(pair, text, tmp_path, monkeypatch):
    alignment, folder = pair
    monkeypatch.setattr("symmerge.cli.barrier.solve_pair", None)  # nothing is aligned
    lines = measured(folder, "--data", text, "--out", tmp_path / "curve").stdout.splitlines()
    task = sm.make_task("clm", str(text), alignment.models, samples=4)
    expected = sm.barrier(*alignment.models, task, 3)
    (row,) = table(lines)
    assert list(row) == [
        "method",
        "loss of the midpoint",
        "perplexity of the midpoint",
        "barrier over the mean",
        "barrier over the line",
    ]
    assert row["method"] == "as aligned"
    assert float(row["loss of the midpoint"]) == pytest.approx(expected.points[1]["loss"], rel=1e-3)
    assert float(row["barrier over the mean"]) == pytest.approx(expected.barrier_mean, rel=2e-2)
    plain = sm.barrier(*alignment.sources, task, 3)
    assert abs(plain.barrier_mean - expected.barrier_mean) > 1e-3  # the control
    ends = next(line for line in lines if line.startswith("# loss (perplexity): A "))
    for metrics in (expected.points[0], expected.points[-1], expected.ensemble):
        assert f"{metrics['loss']:.4g} ({metrics['perplexity']:.4g})" in ends
    record = json.loads((tmp_path / "curve" / "curve.json").read_text())
    assert [method["name"] for method in record["methods"]] == ["aligned"]


def test_a_barrier_needs_neither_task_nor_data_nor_a_folder(seeds, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = measured(*seeds[:2], "--method", "none,permutations").stdout
    assert "no data was given" in said and list(tmp_path.iterdir()) == []
    rows = table(said.splitlines())
    assert [row["method"] for row in rows] == ["plain average", "weight matching, permutations"]
    beside = measured(pair[1], "--method", "permutations").stdout
    assert [row["method"] for row in table(beside.splitlines())] == [
        "as aligned",
        "weight matching, permutations",
    ]
    said = measured(pair[1], "--method", "none", expect=2).stderr
    assert "is already measured as it is; leave out none" in said


def test_many_models_of_a_folder(many, text, monkeypatch):
    monkeypatch.setattr("symmerge.cli.barrier.solve_pair", None)
    said = measured(many[1], "--data", text).stdout
    assert said.count("as aligned\t") == 4 and "# Means over 3 pairs" in said
    together = json.loads(measured(many[1], "--data", text, "--together", "--json").stdout)
    assert together["schema"] == "symmerge.simplex/1"
    assert together["methods"][0]["universe"]["reference"] == 1
