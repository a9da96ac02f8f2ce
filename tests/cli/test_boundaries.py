"""What no verb foresees still ends with one line: strange paths, outputs, files, our bugs."""

import errno
import os
import re
import subprocess
import sys
import time

import pytest
from fixtures import checkpoint, run

from symmerge.cli import console
from symmerge.cli import inspect as verb
from symmerge.errors import SymmergeError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("boundaries") / "model", "gpt2")


def command(*arguments, **options):
    """The command in a process of its own."""
    line = [sys.executable, "-m", "symmerge", *map(str, arguments)]
    return subprocess.run(line, text=True, capture_output=True, timeout=120, **options)


def test_a_bug_of_ours_is_one_line_with_the_details_in_a_file(model, monkeypatch):
    monkeypatch.setattr(verb, "load", lambda *_, **__: 1 / 0)
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


# options in a file

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name}\n  <<: [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
OPTIONS = {
    "aliases of aliases": (f"{LAUGHS}seed: *i\n", "has an alias"),
    "merges of merges": (MERGES, "has nested lists"),
    "many values for one": ("seed: [1, 2]\n", "'seed' must be one value"),
    "a number of many digits": (f"max_shard_size: {10**400}\n", "too large"),
    "an alias": ("out: &o out\nresidual: *o\n", "has an alias"),
    "deep lists": ("seed: " + "[" * 30_000, "has nested lists"),
    "deep mappings": ("seed: " + "{a: " * 3_000, "has nested lists"),
    "a mapping": ("seed: {a: 1}", "neither a value nor a list"),
    "a date": ("seed: 2001-01-01", "neither a value nor a list"),
    "bytes": ("seed: !!binary aGVsbG8=", "neither a value nor a list"),
    "a tag": ("seed: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    "two documents": ("seed: 1\n---\nseed: 2", "cannot be read as YAML"),
    "unknown options": ("colour: red", "unknown option colour"),
    "a list of options": ("- seed", "has no options"),
    "too large": ("#" * 64_001, "64,000 at most"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_cannot_be_read(model, tmp_path, case):
    text, said = OPTIONS[case]
    file = tmp_path / "c.yaml"
    file.write_text(text)
    start = time.perf_counter()
    output = run("random", model, "--out", tmp_path / "o", "--config", file, expect=2).output
    assert time.perf_counter() - start < 1.5
    assert said in " ".join(output.split()) and len(output) < 700
    assert not (tmp_path / "o").exists()


def test_options_from_a_pipe_are_refused(model, tmp_path):
    os.mkfifo(tmp_path / "c.yaml")
    options = ("--out", tmp_path / "o", "--config", tmp_path / "c.yaml")
    assert "not a regular file" in run("random", model, *options, expect=2).output


@pytest.mark.parametrize("text", ["", "# nothing\n", "no-verify: true\nseed: 3\n"])
def test_options_that_can_be_read(model, tmp_path, text):
    """The control."""
    (tmp_path / "c.yaml").write_text(text)
    run("random", model, "--out", tmp_path / "o", "--config", tmp_path / "c.yaml")
    assert (tmp_path / "o" / "config.json").exists()


def test_a_shard_of_infinite_size_is_refused(model, tmp_path):
    run("random", model, "--out", tmp_path / "o", "--max-shard-size", "inf", expect=2)
    assert not (tmp_path / "o").exists()


# outputs that are closed or full


def test_long_messages_keep_their_remedy(capsys):
    with pytest.raises(SystemExit), console.friendly():
        raise SymmergeError(f"{'x' * 10**6}: do this instead")
    said = capsys.readouterr().err
    assert len(said) < 2100 and said.rstrip().endswith("do this instead")


@pytest.mark.parametrize(
    "number", [errno.ENAMETOOLONG, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EISDIR]
)
def test_paths_that_cannot_be_used_are_no_bugs(capsys, number):
    with pytest.raises(SystemExit) as ended, console.friendly():
        raise OSError(number, os.strerror(number), "some/path")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "please report" not in said
    assert "some/path cannot be used" in said and "choose another path" in said


@pytest.mark.parametrize("print_line", [console.say, print])
def test_a_closed_pipe_says_neither_yes_nor_no(monkeypatch, print_line):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(console, "out", type(console.out)())  # the line stays in its buffer
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as ended, console.friendly():
            print_line("the answer")
    assert ended.value.code == 141


def test_errors_are_counted_where_nobody_hears_them(monkeypatch):
    """Standard error is closed or full: the exit code still says it, and warnings stop nothing."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        console.warn("nobody hears this")
        with pytest.raises(SystemExit) as ended, console.friendly():
            raise SymmergeError("nor this: do something else")
    assert ended.value.code == 2


def test_closed_streams_are_no_obstacle(model):
    line = [sys.executable, "-m", "symmerge", "inspect", str(model), "--json"]
    shell = " ".join(f"'{word}'" for word in line) + " <&- >&- 2>&-"
    assert subprocess.run(shell, shell=True, timeout=120).returncode == 0


def test_one_value_is_no_list_of_models(model, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("models: true\n")
    output = run("merge", "--out", tmp_path / "o", "--config", file, expect=2).output
    assert "'models' must be a list" in " ".join(output.split())
