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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    type_checks.start_test(item.path)


@pytest.fixture(autouse=True)
def usual_effort(request, monkeypatch):
    """Weights alone where a test says nothing: learning takes seconds, even for small models."""
    if not request.node.get_closest_marker("real_effort"):
        monkeypatch.setattr("symmerge.matching.efforts.USUAL", "fast")


@pytest.fixture(autouse=True)
def short_searches(request, monkeypatch):
    """Three weightings instead of ten and a hundredth of the text, where a test says nothing."""
    if not request.node.get_closest_marker("real_effort"):
        monkeypatch.setattr("symmerge.matching.search.TRIES", 3)
        monkeypatch.setattr("symmerge.observation.probe.ROWS", 16)
        monkeypatch.setattr("symmerge.observation.probe.LENGTH", 32)


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
