"""What reached the disk differs from what was computed: names, order, precision, config."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import symmerge as sm
import symmerge.models.saving as module
from symmerge.errors import SymmergeError
from symmerge.lab.small_models import small_model
from symmerge.models.canonical.form import canonicalize
from symmerge.models.orbit import random_member
from symmerge.verification.written import gate

Header = dict[str, dict[str, list[int]]]
Edit = Callable[[Header, bytearray], None]
"""Changes the header and the bytes after it, in place."""


def matrices(header: Header) -> list[str]:
    return [name for name in header if len(header[name]["shape"]) == 2]


def swap_two(header: Header, content: bytearray) -> None:
    """Two tensors of one shape get each other's bytes."""
    for first in matrices(header):
        for second in reversed(matrices(header)):
            if first != second and header[first]["shape"] == header[second]["shape"]:
                header[first], header[second] = header[second], header[first]
                return
    raise AssertionError("no two tensors of one shape")


def changed(of: Callable[[torch.Tensor], torch.Tensor], *, square: bool = False) -> Edit:
    def edit(header: Header, content: bytearray) -> None:
        name = next(
            name for name in matrices(header) if not square or len({*header[name]["shape"]}) == 1
        )
        start, end = header[name]["data_offsets"]
        tensor = torch.frombuffer(content[start:end], dtype=torch.float32)
        result = of(tensor.reshape(header[name]["shape"])).contiguous()
        content[start:end] = result.numpy().tobytes()

    return edit


def one_number(tensor: torch.Tensor) -> torch.Tensor:
    largest = tensor.flatten().abs().argmax()
    result = tensor.clone()
    result.view(-1)[largest] *= 1.002
    return result


def forget_the_last(header: Header, content: bytearray) -> None:
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    del content[header.pop(last)["data_offsets"][0] :]


EDITS = {
    "two tensors swapped": swap_two,
    "a square transposed": changed(lambda tensor: tensor.mT, square=True),
    "through bfloat16": changed(lambda tensor: tensor.bfloat16().float()),
    "one number": changed(one_number),
    "a tensor missing": forget_the_last,
}


def edit_file(file: Path, edit: Edit) -> None:
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, content = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    metadata = header.pop("__metadata__")
    edit(header, content)
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content)


def edit_config(file: Path) -> None:
    content = json.loads(file.read_text())
    epsilon = next(key for key in content if "eps" in key)
    file.write_text(json.dumps({**content, epsilon: 1e-4}))


@pytest.mark.parametrize("name", ["bert", "llama", "modernbert"])
@pytest.mark.parametrize("make", [lambda source: random_member(source, 3)[1], canonicalize])
def test_what_is_not_what_was_computed_is_never_kept(name, make, monkeypatch, tmp_path):
    source = sm.load(small_model(name, seed=2))
    model, write = make(source), module.write_weights

    def save_with(fault: Callable[[Path], None]) -> None:
        def write_wrongly(folder: Path, *args: object, **options: object) -> None:
            write(folder, *args, **options)
            fault(folder)

        monkeypatch.setattr(module, "write_weights", write_wrongly)
        sm.save(model, tmp_path / "out", gate=gate(source))

    for edit in EDITS.values():
        with pytest.raises(SymmergeError):
            save_with(lambda folder, edit=edit: edit_file(folder / "model.safetensors", edit))
        assert not list(tmp_path.iterdir())
    with pytest.raises(SymmergeError, match="settings differ"):
        save_with(lambda folder: edit_config(folder / "config.json"))
    assert not list(tmp_path.iterdir())
    save_with(
        lambda folder: edit_file(folder / "model.safetensors", lambda *_: None)
    )  # the control
