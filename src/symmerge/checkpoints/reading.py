"""Open Hugging Face checkpoint folders: config, index, weight files. Tensors stay unread."""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symmerge.checkpoints.files import RESTORE, read_json
from symmerge.checkpoints.limits import LARGEST_TOKENIZER
from symmerge.checkpoints.plain_files import check_plain
from symmerge.checkpoints.safetensors_files import COPY_AGAIN, FileWeights, TensorEntry, read_header
from symmerge.checkpoints.weights import MemoryWeights, StoredWeights
from symmerge.errors import CheckpointError, shown

# In transformers' order of preference, so that both read the same files of a folder.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
# Weights and training state are not copied beside the new weights; code is never copied or run.
NOT_COPIED = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|gguf|py|pkl)$|\.index\.json$"
    r"|^(config|symmerge|metrics)\.json$|^README\.md$|^\."
)
TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("spiece*", "sentencepiece*", "preprocessor_config.json"),
)
"""Files that define preprocessing: tokenizers and image processors."""
NOT_A_FOLDER = (
    "is not a folder: give a checkpoint folder, or a name on the hub"
    " (owner/name, or `hf download NAME --local-dir DIR` and give DIR)"
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder: its config, its tensors (unread), and the small files to copy along."""

    path: Path
    config: dict[str, Any]
    weights: StoredWeights
    files: tuple[Path, ...] = ()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder without reading its tensors.

    Preconditions: config.json and safetensors (or .bin) files. No code is run.
    """
    path = Path(path)
    if not os.path.isdir(path):  # False for a name that is too long, where Path raises
        raise CheckpointError(f"{path} {NOT_A_FOLDER}")
    files = sorted(file for file in path.iterdir() if not file.is_dir())
    besides = [check_plain(file, path) for file in files if not NOT_COPIED.search(file.name)]
    copied = tuple(file for file in besides if _is_small(file))
    return Checkpoint(path, read_config(path), _open_weights(path), copied)


def _is_small(file: Path) -> bool:
    """Whether a file is copied along: logs and data may be large; a tokenizer may not."""
    if not file.exists() or (size := file.stat().st_size) <= LARGEST_TOKENIZER:
        return True
    if any(file.match(pattern) for pattern in TOKENIZER_FILES):
        raise CheckpointError(
            f"{file} has {size:,} bytes, {LARGEST_TOKENIZER:,} at most: {COPY_AGAIN}"
        )
    return False


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder; adapters and quantised models are refused."""
    # transformers loads the base that an adapter names, not the weights beside it
    if (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} is a LoRA adapter, not a model: merge it into its base first"
            " (peft: model.merge_and_unload(), then save)"
        )
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json: is it a Hugging Face checkpoint folder?")
    config = read_json(check_plain(path / "config.json", path))
    if quantisation := config.get("quantization_config"):
        is_dict = isinstance(quantisation, dict)
        method = quantisation.get("quant_method", "unknown method") if is_dict else quantisation
        named = method if isinstance(method, str) and len(method) <= 40 else shown(method)
        raise CheckpointError(
            f"{path} is quantised ({named}) : symmetries act on full weights;"
            " use the float16 or float32 checkpoint"
        )
    return config


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights of a folder."""
    for single in WEIGHT_FILES:
        if (path / single).exists():
            return [check_plain(path / single, path)]
        if (index := path / f"{single}.index.json").exists():
            return _shards(check_plain(index, path))
    others = sorted(file.name for file in path.iterdir() if file.suffix in OTHER_WEIGHTS)
    raise CheckpointError(
        f"{path} has no {' and no '.join(WEIGHT_FILES)} (other weight files:"
        f" {', '.join(others) or 'none'}): convert it with save_pretrained first"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no 'weight_map': {RESTORE}")
    if wrong := [name for name in weight_map.values() if not isinstance(name, str)]:
        raise CheckpointError(
            f"{index} has {shown(wrong[0])} in 'weight_map' where a file name should be: {RESTORE}"
        )
    names = sorted({*weight_map.values()})
    for name in names:
        check_plain(index.parent / name, index.parent)
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: missing shard {', '.join(missing)} of {len(names)}:"
            " the download is incomplete; fetch it again"
        )
    return [index.parent / name for name in names]


def _open_weights(path: Path) -> StoredWeights:
    files = weight_files(path)
    pickled = any(file.suffix == ".bin" for file in files)
    return _open_pickles(files) if pickled else _open_safetensors(files)


def _open_safetensors(shards: list[Path]) -> FileWeights:
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(shard):
            if name in entries:
                raise CheckpointError(
                    f"{name} is stored twice, in {entries[name].path.name} and {shard.name}:"
                    " remove the stale shard"
                )
            entries[name] = entry
    return FileWeights(entries)


def _open_pickles(shards: list[Path]) -> MemoryWeights:
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        try:
            # Files from before torch 1.6 are not zip archives and cannot be mapped.
            mapped = zipfile.is_zipfile(shard)
            if mapped:
                _refuse_compression(shard)
            with warnings.catch_warnings(action="ignore"):  # torch's own, of storages it reads
                content = torch.load(shard, map_location="cpu", weights_only=True, mmap=mapped)
            own = {name: value for name, value in content.items() if isinstance(value, Tensor)}
        except CheckpointError:
            raise
        except Exception as error:  # many types; all mean that it needs code, or is damaged
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            raise CheckpointError(
                f"{shard} cannot be loaded without running code from it, or is damaged ({reason}):"
                " convert it to safetensors where you trust it"
            ) from error
        tensors |= {name: _plain_tensor(shard, name, value) for name, value in own.items()}
    return MemoryWeights(tensors)


def _refuse_compression(shard: Path) -> None:
    """torch.save compresses nothing: what is compressed may be a bomb."""
    with zipfile.ZipFile(shard) as archive:
        if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
            raise CheckpointError(f"{shard} is compressed, which torch.save never does: {RESTORE}")


# What a tensor of a .bin file may be, other than an array of numbers.
STRANGE: tuple[tuple[str, Callable[[Tensor], bool]], ...] = (
    ("has no values (it is on the meta device)", lambda tensor: tensor.is_meta),
    ("is sparse or nested", lambda tensor: tensor.layout != torch.strided or tensor.is_nested),
    ("is quantised", lambda tensor: tensor.is_quantized),
    (
        "is larger than what is stored of it (an expanded view)",
        lambda tensor: tensor.nbytes > tensor.untyped_storage().nbytes(),
    ),
)


def _plain_tensor(shard: Path, name: object, tensor: Tensor) -> Tensor:
    problem = next((words for words, is_so in STRANGE if is_so(tensor)), None)
    if not isinstance(name, str):
        problem = "has no text as its name"
    if problem:
        raise CheckpointError(
            f"{shard}: {shown(name)} {problem}: save the model again with plain float32 tensors"
        )
    return tensor.detach().resolve_neg()
