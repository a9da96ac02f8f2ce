"""What no verb foresees still ends with one line: strange paths, outputs, files, our bugs."""

import os
import re
import subprocess
import sys

import pytest
from fixtures import checkpoint, run

from symmerge.cli import inspect as verb


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("boundaries") / "model", "gpt2")


def command(*arguments, **options):
    """The command in a process of its own."""
    line = [sys.executable, "-m", "symmerge", *map(str, arguments)]
    return subprocess.run(line, text=True, capture_output=True, timeout=120, **options)


def test_a_bug_of_ours_is_one_line_with_the_details_in_a_file(model, monkeypatch):
    monkeypatch.setattr(verb, "load", lambda _: 1 / 0)
    said = " ".join(run("inspect", model, expect=2).output.split())
    assert "ZeroDivisionError" in said and "please report it" in said and "Traceback" not in said
    file = re.search(r"details in (\S+)", said)[1]
    with open(file) as details:
        assert "Traceback" in details.read()
    os.unlink(file)


@pytest.mark.parametrize("name", ["o[/x]", "o[bold]", "[", "ö \u2192"])
def test_paths_are_no_markup(model, tmp_path, name):
    out = tmp_path / name
    said = run("random", model, "--out", out).output
    assert name.split("/")[0] in said.replace("\n", "") and (out / "config.json").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\udcff"])
def test_json_that_cannot_be_parsed_is_named(model, tmp_path, text):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(text, errors="surrogateescape")
    assert "is not valid JSON" in " ".join(run("inspect", tmp_path / "m", expect=2).output.split())


@pytest.mark.parametrize("text", ["[" * 5000, "seed: " + "9" * 5000, "a: &a [*a]"])
def test_yaml_that_cannot_be_used_is_refused(model, tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    said = run("random", model, "--out", tmp_path / "o", "--config", tmp_path / "c.yaml", expect=2)
    assert "Traceback" not in said.output and not (tmp_path / "o").exists()


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_seeds_beyond_64_bits_are_refused(model, tmp_path, seed):
    run("random", model, "--out", tmp_path / "o", f"--seed={seed}", expect=2)
    assert not (tmp_path / "o").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_output_is_said(model):
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "symmerge", "inspect", str(model), "--json"]
        ended = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 2
    assert "the output cannot be written" in ended.stderr and "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_an_ascii_terminal_is_enough(model, tmp_path):
    out = tmp_path / "ö"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    ended = command("random", model, "--out", out, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr and (out / "config.json").exists()
