"""Shapes and types are checked in the tests: jaxtyping with beartype. Common fixtures."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
import type_checks

type_checks.install()
torch.set_num_threads(1)  # the suite runs two workers on two cores
# A script's background jobs ignore Ctrl-C, and so would what the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


EFFORTS = pytest.StashKey()
# What users get, and what tests that say nothing get: learning takes seconds even for small models,
# and so do ten weightings, text of 16,000 tokens and 256 chains.
EFFORT = {
    "symmerge.matching.efforts.USUAL": "fast",
    "symmerge.matching.search.TRIES": 3,
    "symmerge.observation.probe.ROWS": 16,
    "symmerge.observation.probe.LENGTH": 32,
    "symmerge.observation.unigrams.CHAINS": 64,
}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before all fixtures, those of modules among them."""
    type_checks.start_test(item.path)
    item.stash[EFFORTS] = patch = pytest.MonkeyPatch()
    if not item.get_closest_marker("real_effort"):
        for name, value in EFFORT.items():
            patch.setattr(name, value)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    item.stash[EFFORTS].undo()


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch):
    """Whether a job took three seconds would decide what a busy machine prints."""
    monkeypatch.setattr("symmerge.cli.phases.PATIENCE", 1e6)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder for training data, and nothing prepared from any before."""
    monkeypatch.delenv("SYMMERGE_DATA", raising=False)
    monkeypatch.setenv("SYMMERGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"
