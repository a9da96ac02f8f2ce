"""Absurd sizes and depths are refused at once, before memory is taken for them."""

import json
import shutil
import struct
import tracemalloc
from pathlib import Path

import pytest
from fixtures import checkpoint

from symmerge.errors import SymmergeError
from symmerge.models.model import load


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sizes")
    return {name: checkpoint(root / name, name) for name in ("gpt2", "llama", "bert", "vit")}


@pytest.fixture
def copy_of(sources, tmp_path):
    return lambda name: Path(shutil.copytree(sources[name], tmp_path / name))


def refused(folder):
    """The error of loading it, which may not take 50 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(SymmergeError) as error:
            load(folder)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    return str(error.value)


def write_header(folder, text, size=None):
    content = text.encode()
    prefix = struct.pack("<Q", len(content) if size is None else size)
    (folder / "model.safetensors").write_bytes(prefix + content)


@pytest.mark.parametrize("layers", [10**9, 10**30, -1, 60])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_more_layers_than_tensors(copy_of, name, layers):
    folder = copy_of(name)
    config = json.loads((folder / "config.json").read_text())
    field = "n_layer" if "n_layer" in config else "num_hidden_layers"
    (folder / "config.json").write_text(json.dumps({**config, field: layers}))
    assert refused(folder)


@pytest.mark.parametrize(
    "header",
    [
        "[" * 50_000,
        '{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1e999]}}',
        '{"a": {"dtype": "F32", "shape": [9223372036854775807, 9], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [' + "9" * 5000 + '], "data_offsets": [0, 4]}}',
    ],
    ids=["deep", "infinite shape", "infinite offset", "overflow", "digits"],
)
def test_headers_that_make_no_sense(copy_of, header):
    folder = copy_of("gpt2")
    write_header(folder, header)
    assert "model.safetensors" in refused(folder)


def test_a_header_of_gigabytes(copy_of):
    folder = copy_of("gpt2")
    write_header(folder, "{}", size=5 * 10**9)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(6 * 10**9)  # sparse: nothing is on disk
    assert "at most" in refused(folder)
