"""Strange tensors, headers, indices, names and huge weights: one line, nothing written."""

import json
import shutil
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from fixtures import checkpoint
from safetensors.torch import load_file, save_file
from strange import (
    NAN,
    WTE,
    copy_of,
    make_fifo,
    make_loop,
    make_socket,
    one_line,
    refused,
    sources,
)
from typer.testing import CliRunner

from symmerge.cli import app
from symmerge.errors import SymmetryError
from symmerge.models.model import load
from symmerge.symmetry.groups import linalg
from symmerge.symmetry.groups.indices import assign

__all__ = ["copy_of", "sources"]  # fixtures

# tensors in .bin files


def expanded(tensor):
    return torch.zeros(1).expand(10**6, 10**6)


BINS = {
    "float8": (lambda t: t.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "complex": (lambda t: t.to(torch.complex64), "complex64"),
    "meta": (lambda t: t.to("meta"), "meta device"),
    "sparse": (lambda t: t.to_sparse(), "sparse"),
    "quantised": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantised"),
    "boolean": (lambda t: t > 0, "bool"),
    "terabytes": (expanded, "expanded view"),
    "not a tensor": (lambda t: t.tolist(), "missing tensors"),
}


def write_bin(folder, content, **how):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin", **how)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("label", BINS)
def test_bin_tensor(copy_of, label, zipped):
    folder = copy_of("gpt2")
    change, words = BINS[label]
    tensors = load_file(folder / "model.safetensors")
    tensors[WTE] = change(tensors[WTE])
    write_bin(folder, tensors, _use_new_zipfile_serialization=zipped)
    with warnings.catch_warnings(action="error"):  # one line, and none of torch's before it
        said = refused(folder)
    assert not zipped or (words in said and WTE in said)  # older files have fewer kinds of tensors


@pytest.mark.parametrize(
    "content",
    [{"state_dict": {WTE: torch.ones(2)}}, {1: torch.ones(2)}, {}, torch.ones(2), "text"],
    ids=["nested", "number as name", "empty", "a tensor", "a text"],
)
def test_bin_of_something_else(copy_of, content):
    folder = copy_of("gpt2")
    write_bin(folder, content)
    refused(folder)


def test_a_bin_of_no_bytes(copy_of):
    folder = copy_of("gpt2")
    write_bin(folder, {})
    (folder / "pytorch_model.bin").write_bytes(b"")  # torch's error has no message
    assert "is damaged (EOFError)" in refused(folder)


def test_a_compressed_bin(copy_of, tmp_path):
    folder = copy_of("gpt2")
    write_bin(folder, load_file(folder / "model.safetensors"))
    with (
        zipfile.ZipFile(folder / "pytorch_model.bin") as plain,
        zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as squeezed,
    ):
        for item in plain.infolist():
            squeezed.writestr(item.filename, plain.read(item))
    load(folder)  # the control: as torch wrote it
    shutil.move(tmp_path / "z", folder / "pytorch_model.bin")
    assert "compressed" in refused(folder)


def test_a_negative_view_is_read(copy_of):
    """Legal, if odd: a view that negates what is stored."""
    folder = copy_of("gpt2")
    tensors = load_file(folder / "model.safetensors")
    turned = torch.complex(torch.zeros_like(tensors[WTE]), -tensors[WTE]).conj().imag
    assert turned.is_neg()
    write_bin(folder, {**tensors, WTE: turned})
    assert torch.equal(load(folder).weights[WTE], tensors[WTE])


# headers and indices


def rewrite_header(folder, change):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.dumps(change(json.loads(content[8:end]))).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[end:])


ENTRIES = {
    **{
        f"dtype {code}": {"dtype": code}
        for code in ("F4", "F6_E2M3", "F8_E8M0", "C64", "x" * 10**6, 5, None, ["F32"])
    },
    "offsets as text": {"data_offsets": ["0", "4"]},
    "offsets as floats": {"data_offsets": [0.0, 19392.0]},
    "offsets reversed": {"data_offsets": [19392, 0]},
    "negative offset": {"data_offsets": [-4, 19388]},
    "negative shape": {"shape": [-101, -48]},
    "boolean shape": {"shape": [True, 4848]},
    "overflowing shape": {"shape": [2**40, 2**40, 0]},
    "shape beyond 63 bits": {"shape": [2**63, 16]},
    "shape of the same size": {"shape": [48, 101]},
    "shape of nothing": {"shape": [0, 48], "data_offsets": [0, 0]},
    "deep shape": {"shape": [[[101]], 48]},
    "many axes": {"shape": [1] * 5000},
    "no dtype": {"dtype": {}},
}


@pytest.mark.parametrize("label", ENTRIES, ids=lambda label: label[:20])
def test_header_entry(copy_of, label):
    folder = copy_of("gpt2")
    rewrite_header(folder, lambda header: {**header, WTE: {**header[WTE], **ENTRIES[label]}})
    refused(folder)


def test_a_name_of_megabytes_is_cut(copy_of):
    folder = copy_of("gpt2")
    rewrite_header(
        folder, lambda header: {"x" * 10**6 if k == WTE else k: v for k, v in header.items()}
    )
    assert "unexpected tensors" in refused(folder)


INDICES = {
    "a list": {"weight_map": [1]},
    "a text": {"weight_map": "model.safetensors"},
    "numbers": {"weight_map": {WTE: 5}},
    "nothing": {"weight_map": {WTE: None}},
    "lists": {"weight_map": {WTE: ["a.safetensors"]}},
    "empty": {"weight_map": {}},
    "empty name": {"weight_map": {WTE: ""}},
    "zero byte": {"weight_map": {WTE: "a\0.safetensors"}},
    "long name": {"weight_map": {WTE: "x" * 5000}},
    "missing shard": {"weight_map": {WTE: "none.safetensors"}},
    "folder": {"weight_map": {WTE: "sub"}},
    "config": {"weight_map": {WTE: "config.json"}},
}


@pytest.mark.quick
@pytest.mark.parametrize("label", INDICES)
def test_index(copy_of, label):
    folder = copy_of("gpt2")
    (folder / "sub").mkdir()
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {WTE: "a.safetensors"}, "metadata": 5}))
    load(folder)  # the control: a right map, and a total size that nobody needs
    index.write_text(json.dumps(INDICES[label]))
    refused(folder)


# huge finite weights


def scale(folder, factor, dtype, names=""):
    tensors = load_file(folder / "model.safetensors")
    grown = {
        name: tensor * (factor / tensor.abs().max()) if names in name else tensor
        for name, tensor in tensors.items()
    }
    save_file({k: v.to(dtype) for k, v in grown.items()}, folder / "model.safetensors")


def test_weights_that_no_product_survives(copy_of, tmp_path):
    folder, other = copy_of("gpt2"), checkpoint(tmp_path / "other", "gpt2", seed=1)
    scale(folder, 1e30, torch.float32, "mlp")
    lines = {
        one_line("verify", folder, other),
        one_line("same", folder, other),
        one_line("canonical", folder, "--out", tmp_path / "out"),
        one_line("random", folder, "--out", tmp_path / "out"),
        one_line("align", other, folder, "--out", tmp_path / "out", "--recipe", "permutations"),
        one_line("merge", other, folder, "--out", tmp_path / "out", "--recipe", "permutations"),
    }
    assert all("1e+30" in line for line in lines) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("factor", "dtype", "names"),
    [(6e4, torch.float16, ""), (9e11, torch.float32, ""), (9e11, torch.float32, "mlp")],
)
def test_large_weights_get_an_answer_or_one_line(copy_of, tmp_path, factor, dtype, names):
    folder, out = copy_of("gpt2"), tmp_path / "out"
    scale(folder, factor, dtype, names)
    assert one_line("random", folder, "--out", out) and not out.exists()
    for verb in ("verify", "same"):
        ended = CliRunner().invoke(app, [verb, str(folder), str(folder)])
        assert ended.exit_code in (0, 1) or one_line(verb, folder, folder)


def test_numbers_that_are_not_finite_are_said():
    bad = torch.full((3, 3), NAN)
    for compute in (assign, linalg.svdvals):
        compute(torch.eye(3))  # the control
        with pytest.raises(SymmetryError, match="too large"):
            compute(bad)


# files that are no files, names that are no names


@pytest.mark.parametrize("make", [make_fifo, make_socket, Path.mkdir, make_loop])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_no_plain_file(copy_of, monkeypatch, make, name):
    folder = copy_of("gpt2")
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    else:
        (folder / name).unlink()
    monkeypatch.chdir(folder)  # names of sockets are short
    make(Path(name))
    refused(folder)


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "x" * 300, "x/" * 3000])
def test_long_paths(sources, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    pair = sources("gpt2"), checkpoint(tmp_path / "other", "gpt2", seed=1)
    one_line("inspect", name)
    one_line("random", sources("gpt2"), "--out", name)
    one_line("canonical", sources("gpt2"), "--out", name, "--overwrite")
    one_line("align", *pair, "--out", name)
    one_line("merge", *pair, "--out", name)
    one_line("apply", name, sources("gpt2"), "--out", "o")
    assert not [file for file in tmp_path.rglob("*") if "partial" in file.name]
