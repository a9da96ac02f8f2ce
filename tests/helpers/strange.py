"""Copies of good checkpoints to damage, and the line with which they are refused."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from fixtures import checkpoint, run

from symmerge.errors import LONGEST, SymmergeError
from symmerge.models.model import load

WTE = "transformer.wte.weight"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("sources"), {}

    def source(name):
        if name not in made:
            made[name] = checkpoint(root / name, name)
        return made[name]

    return source


@pytest.fixture
def copy_of(sources, tmp_path):
    return lambda name: Path(shutil.copytree(sources(name), tmp_path / name))


def refused(folder, **options):
    """The line with which a folder is refused."""
    with pytest.raises(SymmergeError) as error:
        load(folder, **options)
    said = str(error.value)
    assert "\n" not in said and len(said) <= LONGEST + 10 and ": " in said
    return said


def one_line(*arguments):
    """The line of a command that refuses its input."""
    result = run(*arguments, expect=2)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert "report it" not in result.stderr
    return result.stderr


def set_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_loop(path):
    path.symlink_to(path.name)
