"""Open Hugging Face checkpoints: config, index, safetensors headers and pickles. Tensors stay unread."""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from symmerge.checkpoints.files import read_json
from symmerge.checkpoints.weights import MemoryWeights, Shape, StoredWeights, buffer
from symmerge.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Weights and training state are not copied beside the new weights; code is never copied or run.
NOT_COPIED = re.compile(
    r"(\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|gguf|py|pkl)$)|(\.index\.json$)|^(config|symmerge|metrics)\.json$|^README\.md$|^\."
)
READERS = (
    *(
        "tokenizer*",
        "vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "spiece*",
        "sentencepiece*",
    ),
    "preprocessor_config.json",
)
"""The files that say how inputs are read."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: file, precision, shape, and its bytes from `start` on."""

    path: Path
    dtype: torch.dtype
    shape: Shape
    start: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@final
@dataclass(frozen=True)
class FileWeights(StoredWeights):
    """The tensors of safetensors files, read on demand with plain reads: memory maps would count every page ever touched."""

    entries: Mapping[str, TensorEntry]

    def names(self) -> list[str]:
        return list(self.entries)

    def shape(self, name: str) -> Shape:
        return self.entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].dtype

    def raw(self, name: str) -> Tensor:
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        left = buffer(tensor)
        with open(entry.path, "rb", buffering=0) as file:
            file.seek(entry.start)
            while len(left):
                got = file.readinto(left)
                if not got:
                    raise CheckpointError(
                        f"{entry.path} ends inside {name}: the file is truncated; download or copy it again"
                    )
                left = left[got:]
        return tensor

    def select(self, stored_as: Mapping[str, str]) -> StoredWeights:
        return FileWeights({name: self.entries[stored] for name, stored in stored_as.items()})


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder: its config, its tensors (unread), and the small files that belong to it."""

    path: Path
    config: dict[str, Any]
    weights: StoredWeights
    files: tuple[Path, ...] = field(default=())


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Look at a checkpoint folder without reading its tensors.

    Preconditions: a local folder with config.json and safetensors (or .bin) files; nothing is downloaded, no code is run.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder: give a local checkpoint folder (for a hub name, `hf download NAME --local-dir DIR` first)"
        )
    config = read_config(path)
    return Checkpoint(
        path,
        config,
        _open_weights(path),
        tuple(sorted(p for p in path.iterdir() if p.is_file() and not NOT_COPIED.search(p.name))),
    )


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if (
        path / "adapter_config.json"
    ).exists():  # transformers loads the base it names, not the weights beside it
        raise CheckpointError(
            f"{path} is a LoRA adapter, not a model: merge it into its base first (peft: model.merge_and_unload(), then save)"
        )
    if not file.exists():
        raise CheckpointError(f"{path} has no config.json: is it a Hugging Face checkpoint folder?")
    config = read_json(file)
    if quantisation := config.get("quantization_config"):
        method = (
            quantisation.get("quant_method", "unknown method")
            if isinstance(quantisation, dict)
            else quantisation
        )
        raise CheckpointError(
            f"{path} is quantised ({method}): symmetries act on full weights; use the float16 or float32 checkpoint"
        )
    return config


def _open_weights(path: Path) -> StoredWeights:
    files = weight_files(path)
    return (
        _open_pickles(files)
        if any(file.suffix == ".bin" for file in files)
        else _open_safetensors(files)
    )


def weight_files(path: Path) -> list[Path]:
    # In the order of transformers, so that a folder with several kinds of files means the same to both.
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (path / single).exists():
            return [path / single]
        if (path / index).exists():
            return _shards(path / index)
    found = (
        ", ".join(
            sorted(
                p.name
                for p in path.iterdir()
                if p.suffix in (".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
            )
        )
        or "none"
    )
    raise CheckpointError(
        f"{path} has no model.safetensors and no pytorch_model.bin (other weight files: {found}): convert it with save_pretrained first"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no 'weight_map': restore it from where the model came")
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: missing shard {', '.join(missing)} of {len(names)}: the download is incomplete; fetch it again"
        )
    return [index.parent / name for name in names]


def _open_safetensors(shards: list[Path]) -> FileWeights:
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(shard):
            if name in entries:
                raise CheckpointError(
                    f"{name} is stored twice, in {entries[name].path.name} and {shard.name}: remove the stale shard"
                )
            entries[name] = entry
    return FileWeights(entries)


def read_header(path: Path) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors of one safetensors file, from its header alone; the whole file's length is checked against it."""
    corrupt = f"{path} is not a complete safetensors file"
    remedy = "download or copy it again"
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if (
                len(prefix) < 8
                or not 2 <= (header_size := struct.unpack("<Q", prefix)[0]) <= length - 8
            ):
                raise CheckpointError(
                    f"{corrupt}: its header is cut short ({length} bytes in all); {remedy}"
                )
            header = json.loads(file.read(header_size))
        metadata = header.pop("__metadata__", None)
        assert metadata is None or isinstance(metadata, dict)
        found = sorted(_placed(name, item) for name, item in header.items())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise CheckpointError(
            f"{corrupt}: its header does not parse ({error}); {remedy}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    expected = 0
    for start, end, name, code, shape in found:
        if code not in DTYPES and code not in (
            "I64",
            "I32",
            "U8",
            "BOOL",
            "I8",
            "F8_E4M3",
            "F8_E5M2",
        ):
            raise CheckpointError(f"{path}: {name} has the unknown precision {code}; {remedy}")
        dtype = DTYPES.get(code, _OTHER.get(code, torch.uint8))
        if (
            not expected == start <= end
            or end - start != torch.Size(shape).numel() * dtype.itemsize
        ):
            raise CheckpointError(
                f"{corrupt}: {name} lies at bytes {start} to {end}, which does not fit its shape {list(shape)}; {remedy}"
            )
        expected = end
        yield name, TensorEntry(path, dtype, shape, 8 + header_size + start)
    if 8 + header_size + expected != length:
        raise CheckpointError(
            f"{corrupt}: {length} bytes, but the header promises {8 + header_size + expected}; {remedy}"
        )


def _placed(name: str, item: Mapping[str, Any]) -> tuple[int, int, str, str, Shape]:
    start, end = (int(offset) for offset in item["data_offsets"])
    return start, end, name, str(item["dtype"]), tuple(torch.Size(item["shape"]))


_OTHER = {
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "I8": torch.int8,
}


def _open_pickles(shards: list[Path]) -> MemoryWeights:
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            # Files from before torch 1.6 are no zip archives and cannot be mapped.
            loaded = torch.load(
                shard, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(shard)
            )
            tensors.update(
                {
                    name: value.detach()
                    for name, value in loaded.items()
                    if isinstance(value, Tensor)
                }
            )
        except Exception as error:  # torch raises many kinds here; all mean the file cannot be read without running its code
            reason = str(error).splitlines()[0][:120]
            raise CheckpointError(
                f"{shard} cannot be loaded without running code from it, or is damaged ({reason}): convert it to safetensors where you trust it"
            ) from error
    return MemoryWeights(tensors)
