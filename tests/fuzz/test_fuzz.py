"""A fixed part of the fuzzer runs with the tests; and the fuzzer notices what is unclean."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures import checkpoint

from fuzz.cases import Case, act, concluded, make_case, prepare
from fuzz.damage import PLACES, Damage
from fuzz.sandbox import run
from fuzz.targets import TARGETS
from symmerge.cli import inspect as verb

TESTS = Path(__file__).parent.parent
CASES = 150
NAME = next(target.name for target in TARGETS if target.sample == "gpt2")


def test_damaged_inputs_are_clean(tmp_path):
    line = [sys.executable, "-m", "fuzz", "--seed", "0", "--cases", str(CASES), "--quick"]
    paths = [TESTS, TESTS / "helpers", TESTS.parent / "src"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    ended = subprocess.run(
        line, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{CASES} cases" in ended.stdout and "unclean: none" in ended.stdout


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    root = tmp_path_factory.mktemp("samples")
    (root / "gpt2").mkdir()
    checkpoint(root / "gpt2" / "model", "gpt2")
    return root


@pytest.fixture
def outcome_of(samples, tmp_path):
    """How `inspect` of a good model is judged."""

    def judged(seconds=10.0):
        good = (samples / "gpt2" / "model" / "config.json").read_bytes()
        case = Case(NAME, Damage("none", content=good), ("inspect", "model"))
        before = prepare(case, samples, tmp_path / "case")
        ended = run(lambda: act(case), tmp_path / "case", seconds)
        return concluded(case, tmp_path / "case", before, ended)

    return judged


def test_a_good_input_is_clean(outcome_of):
    assert outcome_of().kind == "done"


def _hog(_):
    """600 MB, given back before the end."""
    kept = [bytearray(b"x" * (1 << 20)) for _ in range(600)]
    raise SystemExit(2 if kept else 0)


def _spin(_):
    while True:
        pass


def _wait(_):
    os.mkfifo("pipe")
    Path("pipe").read_text()


def _touch(folder):
    (folder / "config.json").write_text("{}")
    raise SystemExit(0)


def _leave(_):
    Path("out.partial").write_text("half")
    raise SystemExit(2)


def _touch_outside(_):
    Path("../outside/secret.txt").unlink()
    raise SystemExit(0)


def _write_nan(_):
    Path("out").mkdir()
    Path("out/x.json").write_text('{"loss": NaN}')
    raise SystemExit(0)


def _babble(_):
    print("one\ntwo", file=sys.stderr)
    raise SystemExit(2)


def _raise_bare(_):
    raise BaseException("not one that the handler knows")


PLANTED = {
    "traceback": _raise_bare,
    "unexpected": lambda _: 1 / 0,
    "hang": _spin,
    "hang: waiting": _wait,
    "memory": _hog,
    "touched": _touch,
    "touched: left behind": _leave,
    "touched: outside": _touch_outside,
    "crash": lambda _: os.kill(os.getpid(), 11),
    "bad json": _write_nan,
    "noise": _babble,
    "exit code": lambda _: sys.exit(3),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_noticed(outcome_of, monkeypatch, kind):
    monkeypatch.setattr(verb, "load", lambda folder, **_: PLANTED[kind](folder))
    outcome = outcome_of(1.0 if kind.startswith("hang") else 10.0)
    assert outcome.kind == kind.partition(":")[0], outcome
    assert not outcome.clean


def test_the_line_at_fault_is_named(outcome_of, monkeypatch):
    monkeypatch.setattr(verb, "summary", PLANTED["unexpected"])
    assert re.match(r"cli/inspect\.py:\d+ inspect ZeroDivisionError", outcome_of().where)


def test_a_case_is_kept_as_it_was(tmp_path):
    for kind in ("bytes", *PLACES):
        case = Case(NAME, Damage("x", kind, b"\0\xff"), ("inspect", "model"))
        assert Case.from_json(case.to_json()) == case


def test_the_seed_decides(samples):
    targets = [target for target in TARGETS if target.name == NAME]
    first = [make_case(1, number, samples, targets) for number in range(5)]
    assert first == [make_case(1, number, samples, targets) for number in range(5)]
    assert first != [make_case(2, number, samples, targets) for number in range(5)]
