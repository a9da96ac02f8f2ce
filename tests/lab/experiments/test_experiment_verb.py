"""The verb `experiment`: what it writes, prints and refuses, dry runs, kill -9, Ctrl-C."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import experiment_steps
import pytest
from experiment_steps import EXPERIMENTS, Here
from fixtures import run

from symmerge.cli.options import experiments
from symmerge.lab.experiments import catalog
from symmerge.lab.experiments.store import Store

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
STEPS = Path(experiment_steps.__file__)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(catalog, "EXPERIMENTS", EXPERIMENTS)
    monkeypatch.setattr(experiments, "LocalEngine", lambda workers, heavy: Here())


def results(folder):
    return json.loads((folder / "results.json").read_text())


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_results_are_written_and_shown(tmp_path):
    out = tmp_path / "out"
    said = run("experiment", "sums", "--out", out, "--size", "small")
    assert (
        "# Sums" in said.stdout
        and "± 0.0" in said.stdout
        and "(published 0.5)" in said.stdout
        and "7 cells computed, 0 reused" in said.stdout
    )
    assert "7/7 add last: computed" in said.stderr
    found = results(out)
    assert (found["schema"], found["name"], found["size"]["name"], found["failed"]) == (
        "symmerge.experiment/1",
        "sums",
        "small",
        [],
    )
    lines, last, models = found["tables"][0]["entries"]
    assert found["tables"][0]["rows"] == ["lines", "last", "models"] and found["tables"][0][
        "columns"
    ] == ["text", "all"]
    assert (
        len(lines["values"]) == 3
        and lines["published"] == 0.5
        and lines["standard_error"] > 0
        and last["standard_error"] is None
    )
    assert models["mean"] == pytest.approx(1 / 7)
    assert (
        "seconds" not in (out / "results.json").read_text()
        and "sums of sums" in (out / "page.html").read_text().lower()
    )

    before = (out / "results.json").read_bytes()
    assert "add --resume" in run("experiment", "sums", "--out", out, expect=2).stderr
    assert (
        "0 cells computed, 7 reused" in run("experiment", "sums", "--out", out, "--resume").stdout
    )
    assert (out / "results.json").read_bytes() == before
    more = run(
        "experiment", "sums", "--out", out, "--resume", "--seeds", 4
    ).stdout  # more seeds: what is there counts
    assert "5 cells computed, 6 reused" in more and results(out)["size"]["seeds"] == 4


def test_a_folder_belongs_to_one_experiment_and_size(tmp_path):
    run("experiment", "sums", "--out", tmp_path / "out", "--size", "smoke")
    for words in (("sums", "--size", "small"), ("shaky", "--size", "smoke")):
        said = run("experiment", *words, "--out", tmp_path / "out", "--resume", expect=2).stderr
        assert "holds sums at size smoke" in said and "choose another --out" in said
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert (
        "does not hold an experiment"
        in run("experiment", "sums", "--out", tmp_path / "mine", "--resume", expect=2).stderr
    )
    assert (
        "is a file"
        in run("experiment", "sums", "--out", tmp_path / "mine" / "thesis.tex", expect=2).stderr
    )
    assert files(tmp_path / "mine") == ["thesis.tex"]


def test_failed_cells_are_listed_and_the_rest_is_there(tmp_path):
    said = run("experiment", "shaky", "--out", tmp_path / "out", "--size", "smoke", expect=1)
    assert (
        "flaky last\tRuntimeError: not this time" in said.stdout
        and "last\tmissing" in said.stdout
        and "1 cells failed" in said.stderr
    )
    found = results(tmp_path / "out")
    assert [row["reason"] for row in found["failed"]] == ["RuntimeError: not this time"] and found[
        "tables"
    ][0]["entries"][0]["values"]
    assert "not this time" in (tmp_path / "out" / "failures.log").read_text()


def test_dry_runs_write_nothing(tmp_path):
    out = tmp_path / "out"
    said = run("experiment", "sums", "--out", out, "--dry-run").stdout
    assert (
        "add model 0\tadd\tto do\t30 s\t1.5 GB" in said
        and "total: 7 cells\t\t7 to do\t3.5 min\t1.5 GB" in said
        and not out.exists()
    )
    run("experiment", "sums", "--out", out)
    before = files(out)
    said = run("experiment", "sums", "--out", out, "--dry-run", "--seeds", 4).stdout
    assert (
        "add model 0\tadd\tdone" in said
        and "add model 3\tadd\tto do" in said
        and "5 to do" in said
        and files(out) == before
    )
    assert (
        "2.3 h"
        in run(
            "experiment",
            "sums",
            "--out",
            tmp_path / "p",
            "--size",
            "published",
            "--device",
            "cpu",
            "--dry-run",
        ).stdout
    )
    assert (
        "3.5 min"
        in run(
            "experiment", "sums", "--out", tmp_path / "p", "--size", "published", "--dry-run"
        ).stdout
    )


def test_some_columns_first(tmp_path):
    words = ("experiment", "sums", "--out", tmp_path / "out")
    said = run(*words, "--column", "al").stdout
    assert "3 cells computed" in said and results(tmp_path / "out")["tables"][0]["columns"] == [
        "all"
    ]
    assert "4 to do" in run(*words, "--dry-run").stdout
    assert (
        "4 cells computed, 3 reused"
        in run(*words, "--resume", "--column", "text", "--column", "all").stdout
    )
    assert results(tmp_path / "out")["tables"][0]["columns"] == ["text", "all"]


def test_what_is_finished_is_shown_without_computing(tmp_path, monkeypatch):
    words = (
        "experiment",
        "sums",
        "--out",
        tmp_path / "out",
        "--size",
        "published",
        "--device",
        "cpu",
        "--data-dir",
        tmp_path,
    )
    (tmp_path / "tinyshakespeare.txt").touch()
    (tmp_path / "gpt2_tokenizer").mkdir()
    assert (
        "nothing of sums at size published is finished" in run(*words, "--show", expect=2).stderr
        and not (tmp_path / "out").exists()
    )
    run(*words, "--column", "all")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with Store(tmp_path / "out").locked():  # a run is at work
        said = run(*words, "--show").stdout
    assert (
        "lines\tmissing (published 0.5)" in said
        and "models\t\t0.143 ± 0.082" in said
        and "0 cells computed, 3 reused" in said
    )
    assert [entry["values"] for entry in results(tmp_path / "out")["tables"][0]["entries"]][:2] == [
        [],
        [],
    ] and (tmp_path / "out" / "page.html").is_file()


REFUSED = {
    "no such column": (
        ("sums", "--out", "x", "--column", "pictures"),
        "--column pictures: no column has that in its name; choose from text, all",
    ),
    "unknown": (("nothing",), "no experiment is called nothing"),
    "no folder": (("sums",), "add --out DIR"),
    "size": (
        ("sums", "--out", "x", "--size", "huge"),
        "--size huge: choose smoke, small or published",
    ),
    "engine": (("sums", "--out", "x", "--engine", "dask"), "--engine dask: choose local or ray"),
    "address": (("sums", "--out", "x", "--address", "auto"), "add --engine ray"),
    "device": (("sums", "--out", "x", "--device", "tpu"), "choose cpu or cuda"),
    "data": (
        ("sums", "--out", "x", "--size", "published"),
        "needs the data of shakespeare-gpt2: shakespeare does not come with the installation",
    ),
    "no such data": (
        ("sums", "--out", "x", "--size", "published", "--data-dir", "."),
        "tinyshakespeare.txt is missing, but the data set shakespeare is read from it",
    ),
    "no GPU": (
        ("shaky", "--out", "x", "--size", "published"),
        "PyTorch sees none here: on one core it would take about 2.3 h; use --size small",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path, monkeypatch):
    words, expected = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SYMMERGE_DATA", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = run("experiment", *words, expect=2)
    assert expected in said.stderr and not files(tmp_path)
    assert ("sums\tsums of sums\tno paper" in said.stdout) == (case == "unknown")


def test_published_runs_where_its_data_is(tmp_path, monkeypatch):
    monkeypatch.delenv("SYMMERGE_DATA", raising=False)
    words = (
        "experiment",
        "sums",
        "--out",
        tmp_path / "out",
        "--size",
        "published",
        "--device",
        "cpu",
        "--data-dir",
        tmp_path,
    )
    (tmp_path / "tinyshakespeare.txt").touch()
    assert "gpt2_tokenizer is missing" in run(*words, expect=2).stderr
    (tmp_path / "gpt2_tokenizer").mkdir()
    run(*words)
    assert results(tmp_path / "out")["size"] == {
        "name": "published",
        "seeds": 3,
        "points": 21,
        "device": "cpu",
    }
    (
        tmp_path / "tinyshakespeare.txt"
    ).unlink()  # what is finished is shown without its data, and only that
    assert (
        "0 cells computed" in run(*words, "--resume").stdout
        and "is missing" in run(*words, "--resume", "--seeds", 4, expect=2).stderr
    )


@pytest.fixture
def start(tmp_path, monkeypatch):
    """The verb in a process of its own, with two workers; and what its steps have logged."""
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv(experiment_steps.LOG, str(log))
    monkeypatch.setenv(experiment_steps.PAUSE, "0.2")

    def started(*words):
        command = [
            sys.executable,
            str(STEPS),
            "experiment",
            "sums",
            "--out",
            str(tmp_path / "out"),
            "--workers",
            "2",
            "--seeds",
            "4",
            *words,
        ]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return started, lambda: log.read_text().splitlines()


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)


def living(tmp_path):
    """Processes of a run and their children: all have the log in their environment.

    Ray's agents, which do no work, may stay for a minute.
    """
    found, mark = [], f"{experiment_steps.LOG}={tmp_path}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [file.parent.name] * (
                mark in file.read_bytes() and b"Agent" not in file.with_name("cmdline").read_bytes()
            )
    return found


def finished(folder):
    return {path.parent.name for path in (folder / "cells").glob("[!.]*/result.json")}


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=needs_ray)])
def test_a_killed_run_goes_on_where_it_was(engine, start, tmp_path, monkeypatch):
    started, lines = start
    monkeypatch.setenv(experiment_steps.PAUSE, "0.6")
    process = started("--engine", engine)
    wait_for(lines)
    time.sleep(random.uniform(0, 1))
    before = " ".join(lines()).count("begin")
    wait_for(lambda: " ".join(lines()).count("begin") > before)
    time.sleep(random.uniform(0, 0.3))
    process.kill()
    process.communicate()
    wait_for(lambda: not living(tmp_path))
    said = " ".join(lines())
    assert engine == "ray" or said.count("begin") > said.count(
        "end"
    )  # workers die with it, in the middle of their cells
    monkeypatch.setenv(experiment_steps.PAUSE, "0")
    done, begun = finished(tmp_path / "out"), len(lines())
    assert 0 <= len(done) < 11 and not (tmp_path / "out" / "results.json").exists()
    said = run("experiment", "sums", "--out", tmp_path / "out", "--seeds", 4, "--resume").stdout
    assert f"{11 - len(done)} cells computed, {len(done)} reused" in said
    assert (
        len({line for line in lines()[begun:] if line.startswith("begin")})
        == len(lines()[begun:]) / 2
        == 11 - len(done)
    )
    assert (
        len(finished(tmp_path / "out")) == len(list((tmp_path / "out" / "cells").iterdir())) == 11
    )
    run("experiment", "sums", "--out", tmp_path / "whole", "--seeds", 4)
    assert (tmp_path / "whole" / "results.json").read_bytes() == (
        tmp_path / "out" / "results.json"
    ).read_bytes()


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=needs_ray)])
def test_ctrl_c_keeps_what_is_finished(engine, start, tmp_path):
    started, lines = start
    process = started("--engine", engine)
    wait_for(lambda: any(line.startswith("end") for line in lines()))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, problems = process.communicate(timeout=60)
    assert (
        process.returncode == 130
        and "continue with --resume" in problems
        and "Traceback" not in problems
    ), problems
    wait_for(lambda: not living(tmp_path))
    kept = finished(tmp_path / "out")
    assert (
        len(kept) == len(list((tmp_path / "out" / "cells").iterdir())) < 11
        and not (tmp_path / "out" / "results.json").exists()
    )
    assert (
        f"{11 - len(kept)} cells computed, {len(kept)} reused"
        in run("experiment", "sums", "--out", tmp_path / "out", "--seeds", 4, "--resume").stdout
    )
