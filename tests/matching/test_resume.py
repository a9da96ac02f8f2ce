"""A file to resume from is what was written, or it is refused: nothing after it checks again."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from symmerge.checkpoints.tensor_file import KEY
from symmerge.errors import CheckpointError
from symmerge.matching.resume import ResumeEntry, ResumeFile

ELEMENTS = {"best": {"ff.0": {"index": torch.arange(4), "scale": torch.rand(4)}}}


@pytest.fixture
def file(tmp_path):
    resume_file = ResumeFile(tmp_path / "x.partial.safetensors", {"task": 1})
    resume_file.write(ResumeEntry({"trials": [1, 2]}, ELEMENTS))
    return resume_file


def changed(file, *, tensors=None, **header):
    """Write the file again with other tensors, or other entries of its header."""
    with safe_open(file.path, "pt") as opened:
        about = {**json.loads(opened.metadata()[KEY]), **header}
    save_file({**load_file(file.path), **(tensors or {})}, file.path, {KEY: json.dumps(about)})


def test_what_was_written_is_read(file):
    changed(file)  # nothing
    entry = file.read()
    assert entry.record == {"trials": [1, 2]}
    assert torch.equal(entry.elements["best"]["ff.0"]["index"], torch.arange(4))


@pytest.mark.parametrize(
    "damage",
    [
        {"tensors": {"best/ff.0/index": torch.arange(4).flip(0)}},
        {"tensors": {"best/ff.0/index": torch.arange(4).float()}},
        {"tensors": {"best/ff.0/index": torch.arange(4)[None]}},
        {"tensors": {"x": torch.ones(1)}},
        {"record": '{"trials": [1]}'},
        {"record": "{"},
        {"record": None},
        {"sha256": None},
    ],
)
def test_damage_is_refused(file, damage):
    changed(file, **damage)
    with pytest.raises(CheckpointError, match=r"is damaged .*: remove it and start again"):
        file.read()
