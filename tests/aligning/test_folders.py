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
    for name in ("align", "align_many"):  # nothing is solved again
        monkeypatch.setattr(f"symmerge.merging.pipeline.{name}", None)
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
    assert "is aligned already" in said and not (tmp_path / "x").exists()


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
        with pytest.raises(CheckpointError, match=f"is no aligned folder: .*{what}.*{remedy}"):
            sm.load_aligned(other)
    said = run("merge", seeds[0], "--out", tmp_path / "merged", expect=2).stderr
    assert "it is a single checkpoint" in said and said.count("\n") == 1
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
    with pytest.raises(MismatchError, match="is aligned already: leave out"):
        sm.merge(folder, method="learned")
