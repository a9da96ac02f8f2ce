"""kill -9 at any moment of every verb that writes: the same command again gives the same bytes.

Some kills here; `make kills` does fifty of each verb.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from symmerge.checkpoints import tensor_file
from symmerge.checkpoints.files import discard, replacing
from symmerge.checkpoints.folders import foreign_files
from symmerge.cli import VERBS

PROGRAM = Path(__file__).parents[1] / "helpers" / "killed_verbs.py"
KILLS = 2
ONLY_READ = {"inspect", "verify", "same"}
KILLED_ELSEWHERE = {"derive", "kinship"}  # they write as others do: `make kills`


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What was seen of every verb."""
    line = [sys.executable, PROGRAM, tmp_path_factory.mktemp("killed"), "--quick"]
    line += ["--kills", str(KILLS)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=400)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return {row["label"]: row for row in map(json.loads, out.splitlines())}


def test_every_verb_that_writes_is_killed(killed):
    assert {label.split()[0].strip(",") for label in killed} == {
        *VERBS
    } - ONLY_READ - KILLED_ELSEWHERE | {"torn"}


def test_killed_verbs_end_with_the_same_bytes(killed):
    wrong = {label: row["problems"] for label, row in killed.items() if label != "torn"}
    assert not any(wrong.values()), wrong
    moments = sum((Counter(row["moments"]) for row in killed.values()), Counter())
    assert moments["before"] and moments["during"] and moments["after"], moments


def test_a_verb_that_writes_in_place_is_noticed(killed):
    assert any("not complete" in problem for problem in killed["torn"]["problems"])


def _killed_in(code, target):
    """Run code that begins to replace the target and then kills itself."""
    program = f"""
import os
from pathlib import Path
from symmerge.checkpoints.files import replacing
with replacing(Path({str(target)!r})) as beside:
    {code}
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL


@pytest.mark.parametrize("code", ["beside.write_text('x')", "beside.mkdir()"])
def test_temporary_files_of_killed_writers_are_removed(tmp_path, code):
    target = tmp_path / "result.json"
    target.write_text("old")
    _killed_in(code, target)
    assert len(list(tmp_path.iterdir())) == 2 and target.read_text() == "old"
    with replacing(target) as beside, replacing(tmp_path / "other.json") as other:
        other.write_text("other")
        with replacing(target) as again:  # another writer of the same target, which is alive
            again.write_text("again")
        beside.write_text("new")
    assert target.read_text() == "new" and len(list(tmp_path.iterdir())) == 2
    _killed_in(code, target)
    assert foreign_files(tmp_path) == ["other.json", "result.json"]  # the rest is known as ours
    discard(target)
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


def test_temporary_files_of_safetensors_are_removed(tmp_path, monkeypatch):
    """safetensors writes beside the file that it is given, under a name that it makes up."""

    def killed(tensors, path, metadata):
        Path(path).with_name(".tmpQBmGOm").write_text("x")
        os._exit(9)

    monkeypatch.setattr(tensor_file, "save_file", killed)
    child = os.fork()
    if child == 0:
        tensor_file.write_tensors(tmp_path / "state.safetensors", {}, {})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.rglob("*"))) == 2  # a folder of ours, and in it the file
    monkeypatch.undo()
    tensor_file.write_tensors(tmp_path / "state.safetensors", {"x": torch.ones(2)}, {})
    assert [path.name for path in tmp_path.rglob("*")] == ["state.safetensors"]
