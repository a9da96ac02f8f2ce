"""Large tensors are mapped into memory: the same bits, and never a change of the file."""

import json
import os
import struct
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from symmerge.checkpoints import safetensors_files
from symmerge.checkpoints.safetensors_files import LARGE, FileWeights, read_header
from symmerge.errors import CheckpointError

KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def file(tmp_path):
    """A file with large tensors in every precision, a small one and an empty one."""
    tensors = {
        str(kind): torch.randn(LARGE // kind.itemsize + 3, generator=torch.manual_seed(1)).to(kind)
        for kind in KINDS
    }
    tensors |= {"small": torch.randn(3, 5), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def weights(path):
    return FileWeights(dict(read_header(path)))


@pytest.fixture
def count_maps(monkeypatch):
    """How many tensors were mapped."""
    maps, original = [], safetensors_files._mapped

    def counted(entry):
        result = original(entry)
        maps.append(result is not None)
        return result

    monkeypatch.setattr(safetensors_files, "_mapped", counted)
    return maps


def test_large_tensors_are_mapped_and_equal(file, count_maps):
    expected = load_file(file)
    for name in weights(file):
        assert torch.equal(weights(file).raw(name), expected[name])
    assert count_maps == [True] * len(KINDS)


def test_a_change_in_memory_leaves_the_file(file):
    before, raw = sha256(file.read_bytes()).digest(), weights(file).raw("torch.float32")
    raw.zero_()
    assert not raw.any()
    assert sha256(file.read_bytes()).digest() == before
    assert weights(file).raw("torch.float32").any()


def test_a_tensor_outlives_its_file(file):
    expected, raw = load_file(file)["torch.float32"].clone(), weights(file).raw("torch.float32")
    file.unlink()
    assert torch.equal(raw, expected)


def test_a_mapped_tensor_holds_no_open_file(file):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    before, known = open_files(), weights(file)
    kept = [known.raw("torch.float32") for _ in range(50)]
    assert len(kept) == 50 and open_files() == before


def test_numbers_that_are_not_aligned_are_read(tmp_path, count_maps):
    tensor = torch.randn(LARGE)
    header = {"x": {"dtype": "F32", "shape": [LARGE], "data_offsets": [0, tensor.nbytes]}}
    text = json.dumps(header).encode()
    text += b" " * ((1 - len(text)) % 4)  # numbers begin at an odd byte
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + tensor.numpy().tobytes())
    assert torch.equal(weights(path).raw("x"), tensor)
    assert count_maps == [False]


def test_a_file_cut_after_its_header_was_read_is_an_error(file):
    known = weights(file)
    with open(file, "r+b") as stream:
        stream.truncate(file.stat().st_size - LARGE)
    with pytest.raises(CheckpointError, match="truncated"):
        for name in known:
            known.raw(name)


def test_where_nothing_can_be_mapped_tensors_are_read(file, monkeypatch, count_maps):
    def refuse(*args, **kwargs):
        raise RuntimeError("unable to mmap")

    expected = load_file(file)["torch.float32"]  # safetensors maps it, too
    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    assert torch.equal(weights(file).raw("torch.float32"), expected)
    assert count_maps == [False]
