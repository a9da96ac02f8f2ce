"""Every verb once, on the smallest models: part of `make check`."""

import json

import pytest
from fixtures import checkpoint, run

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two GPT-2s of different seeds and a text."""
    root = tmp_path_factory.mktemp("smoke")
    (root / "text.txt").write_text("One short text, read again and again. " * 40)
    return [*(checkpoint(root / f"seed-{seed}", "gpt2", seed=seed) for seed in (0, 1)), root]


def test_look_move_and_compare(models, tmp_path):
    a, b, _ = models
    assert json.loads(run("inspect", a, "--json").stdout)
    run("random", a, "--out", tmp_path / "random", "--seed", 1)
    run("canonical", a, "--out", tmp_path / "canonical")
    run("apply", tmp_path / "random" / "alignment.safetensors", a, "--out", tmp_path / "applied")
    run("verify", a, tmp_path / "applied")
    run("verify", a, b, expect=1)
    run("same", a, tmp_path / "random")
    run("same", a, b, expect=1)


def test_align_merge_measure_and_report(models, tmp_path):
    a, b, root = models
    data = ("--data", root / "text.txt", "--samples", 4)
    run("align", a, b, "--recipe", "permutations", "--out", tmp_path / "aligned")
    run("verify", b, tmp_path / "aligned" / "aligned")
    looked_at = ("--calibration", root / "text.txt", "--calibration-samples", 4)
    run("statistics", a, b, *looked_at, "--out", tmp_path / "statistics.safetensors")
    run("merge", a, b, "--recipe", "weights-only", "--tries", 1, "--out", tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").exists()
    measured = ("--task", "clm", *data, "--points", 3, "--method", "none")
    run("barrier", a, b, *measured, "--out", tmp_path / "line")
    run("report", tmp_path / "line", "--out", tmp_path / "page.html")
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_the_laboratory(tmp_path, monkeypatch):
    assert "vit-digits" in run("train", "--list").stdout
    run("train", "vit-digits", "--steps", 2, "--out", tmp_path / "vit")
    run("verify", tmp_path / "vit", tmp_path / "vit")
    assert run("experiment", "t-methods", "--dry-run", "--out", tmp_path / "e").stdout
    monkeypatch.setattr("symmerge.lab.demonstration.SMALL", ("gpt2", "vit"))  # all: test_cli.py
    assert len(json.loads(run("demo", "--symmetries", "--json").stdout)) == 2
