"""Read and write Hugging Face checkpoints tensor by tensor: sharded, atomic, and never a whole model in memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import struct
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from symmerge.checkpoints.weights import MemoryWeights, Shape, StoredWeights, Weights, buffer
from symmerge.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
DEFAULT_SHARD = 5 * 10**9
M_MMAP_THRESHOLD, LARGE_TENSOR = -3, 1 << 20
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
    config = _read_config(path)
    return Checkpoint(
        path,
        config,
        _open_weights(path),
        tuple(sorted(p for p in path.iterdir() if p.is_file() and not NOT_COPIED.search(p.name))),
    )


def content_of(path: str | Path) -> str:
    """The hash of what a checkpoint is, wherever it lies: config, weights and what reads its inputs, file by file. Nothing else in the folder counts."""
    path = Path(path)
    _read_config(path)
    readers = [
        file
        for file in path.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in READERS)
    ]
    return files_digest(path, {path / "config.json", *_weight_files(path), *readers})


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """The hash of what files of a folder are called and hold."""
    return hashlib.sha256(
        "".join(
            f"{file.relative_to(folder).as_posix()} {file_digest(file)}\n" for file in sorted(files)
        ).encode()
    ).hexdigest()


def any_digest(path: Path) -> str:
    """The hash of a file, or of all files in a folder."""
    return (
        file_digest(path)
        if path.is_file()
        else files_digest(path, (file for file in path.rglob("*") if file.is_file()))
    )


def file_digest(file: Path) -> str:
    """The hash of a file's bytes, however long it is."""
    try:
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def return_freed_memory() -> None:
    """Give large tensors mappings of their own, so that freed ones go back to the system. For processes that stream a checkpoint and end.

    In glibc's heap the holes that aligned tensors leave are often too small for the next ones: streaming 2 GB filled 1.7 GB.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_MMAP_THRESHOLD, LARGE_TENSOR)


def _read_config(path: Path) -> dict[str, Any]:
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


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file} is not valid JSON ({error}): restore it from where the model came"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object: restore it from where the model came")
    return content


def _open_weights(path: Path) -> StoredWeights:
    files = _weight_files(path)
    return (
        _open_pickles(files)
        if any(file.suffix == ".bin" for file in files)
        else _open_safetensors(files)
    )


def _weight_files(path: Path) -> list[Path]:
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


@dataclass(frozen=True)
class Shard:
    """One file to be written: its name, its header, and the tensors in it."""

    file: str
    header: bytes
    names: tuple[str, ...]


def plan_shards(weights: Weights, stored_as: Mapping[str, str], max_bytes: int) -> list[Shard]:
    """Divide the tensors over files of at most `max_bytes` (a larger tensor gets a file of its own)."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in weights.names():
        needed = _bytes(weights, name)
        if groups[-1] and filled + needed > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += needed
    count = len(groups)
    files = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    return [
        Shard(file, _header(weights, names, stored_as), tuple(names))
        for file, names in zip(files, groups, strict=True)
    ]


def _header(weights: Weights, names: list[str], stored_as: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        dtype, shape = weights.dtype(name), weights.shape(name)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        header[stored_as.get(name, name)] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_weights(
    folder: Path,
    weights: Weights,
    *,
    stored_as: Mapping[str, str] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write tensors as the hub names them, each while the next ones are computed."""
    stored_as = stored_as or {}
    shards = plan_shards(weights, stored_as, max_shard_bytes)
    order = [name for shard in shards for name in shard.names]
    with closing(_computed(weights, order)) as tensors:
        for shard in shards:
            with open(folder / shard.file, "wb", buffering=0) as file:
                file.write(shard.header)
                for name in shard.names:
                    _write_all(file, next(tensors))
                    if progress:
                        progress(name)
    if len(shards) > 1:
        total = sum(_bytes(weights, name) for name in order)
        weight_map = {
            stored_as.get(name, name): shard.file for shard in shards for name in shard.names
        }
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )


def _computed(weights: Weights, order: list[str]) -> Generator[Tensor]:
    """The tensors in this order, as they are stored. Two threads, so that one reads and hashes while the other multiplies."""
    most = max(
        (_bytes(weights, name) for name in order), default=0
    )  # so much is under way at a time: the largest comes alone
    pending: deque[tuple[str, Future[Tensor]]] = deque()
    held, at = 0, 0
    pool = ThreadPoolExecutor(2)
    try:
        while pending or at < len(order):
            while at < len(order) and held + _bytes(weights, order[at]) <= most:
                pending.append((order[at], pool.submit(_stored, weights, order[at])))
                held, at = held + _bytes(weights, order[at]), at + 1
            name, tensor = pending.popleft()
            yield tensor.result()
            held -= _bytes(weights, name)
            del tensor
    finally:  # after an error or an interrupt, what has not begun does not begin
        pool.shutdown(cancel_futures=True)


def _stored(weights: Weights, name: str) -> Tensor:
    tensor = weights[name].to(weights.dtype(name)).contiguous()
    if (
        tensor.dtype == torch.float16
        and tensor.numel()
        and not all(bound.isfinite() for bound in torch.aminmax(tensor))
    ):
        raise CheckpointError(
            f"{name} has entries above 65504, too large for float16: convert the source to bfloat16 or float32 first"
        )
    return tensor


def _bytes(weights: Weights, name: str) -> int:
    return torch.Size(weights.shape(name)).numel() * weights.dtype(name).itemsize


def _write_all(file, tensor: Tensor) -> None:
    left = buffer(tensor)
    while len(left):
        left = left[file.write(left[: 1 << 30]) :]


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """JSON as the hub writes it."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")


@contextmanager
def new_folder(
    target: str | Path,
    *,
    overwrite: bool = False,
    needs_bytes: int = 0,
    inputs: tuple[Path, ...] = (),
) -> Iterator[Path]:
    """A folder that appears at `target` whole or not at all.

    Everything is written beside the target and renamed at the end, so a killed run leaves at most a hidden `.partial` folder,
    which the next run to the same target removes.
    """
    target = Path(target).absolute()
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        _sweep(target)
        refuse(target, overwrite, inputs)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < needs_bytes + (1 << 20):
            raise CheckpointError(
                f"{target.parent} has {free / 1e9:.1f} GB free, {needs_bytes / 1e9:.1f} GB are needed: free some or choose another --out"
            )
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"cannot write beside {target}: {error.strerror}; choose another --out"
        ) from error
    try:
        yield partial
        _swap(partial, target, overwrite)
    except OSError as error:
        raise CheckpointError(
            f"writing {target} failed: {error.strerror}; nothing was left there"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse(target: Path, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    """Refuse a target that exists, or that holds an input or lies in one: ask before long work, not after it."""
    for path in inputs:
        path, here = path.resolve(), target.resolve()
        if here == path or path in here.parents or here in path.parents:
            raise CheckpointError(
                f"the output {target} and the input {path} lie inside each other: choose another --out"
            )
    if target.exists() and not overwrite:
        raise CheckpointError(
            f"{target} exists: choose another --out, or --overwrite to replace it"
        )
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: choose another --out")


def _sweep(target: Path) -> None:
    """Remove what killed runs left for this target, and put back what one was about to replace; what a living process is writing stays."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d{{1,9}})(\.old)?\.partial")
    for stale in target.parent.glob(".*.partial"):
        found = pattern.fullmatch(stale.name)
        if found is None or _alive(int(found[1])):
            continue
        if found[2] and not target.exists():
            stale.rename(target)
        else:
            shutil.rmtree(stale, ignore_errors=True)


def _alive(process: int) -> bool:
    if process == os.getpid():  # ours now, an earlier run's then: containers count from one
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _swap(partial: Path, target: Path, overwrite: bool) -> None:
    if not overwrite or not target.exists():
        partial.rename(target)  # fails where another run was faster
        return
    old = target.parent / f".{target.name}.{os.getpid()}.old.partial"
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
