"""Mutations of safetensors files and pickles: headers, and tensors that do not belong."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fuzz.byte_mutators import mutate_bytes
from fuzz.damage import Damage
from fuzz.json_mutators import mutate_document

SIZES = (0, 1, 2, 7, 8, 2**20, 10**8, 10**8 + 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), 1e38, 3e38, 1e-45, 0.0, 1e19, -1.0)
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int8),
    *(torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
)


def _parts(content: bytes) -> tuple[bytes, bytes]:
    """Header and data."""
    size = struct.unpack("<Q", content[:8])[0]
    return content[8 : 8 + size], content[8 + size :]


def _joined(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def mutate_header(rng: random.Random, content: bytes) -> Damage:
    """Values of the header, its bytes, or its size."""
    header, data = _parts(content)
    kind = rng.choice(("values", "values", "values", "bytes", "size"))
    if kind == "values":
        return Damage("header: values", content=_joined(mutate_document(rng, header), data))
    if kind == "bytes":
        return Damage("header: bytes", content=_joined(mutate_bytes(rng, header).content, data))
    return Damage("header: size", content=struct.pack("<Q", rng.choice(SIZES)) + header + data)


def mutate_data(rng: random.Random, content: bytes) -> Damage:
    """Numbers that are not finite, huge or tiny, where the tensors are."""
    header, data = _parts(content)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 50))):
        value = struct.pack("<f", rng.choice(FLOATS))
        at = rng.randrange(max(1, len(changed) - 4)) // 4 * 4
        changed[at : at + 4] = value
    return Damage("data: numbers", content=_joined(header, bytes(changed)))


def odd_tensor(rng: random.Random, tensor: Tensor) -> Tensor:
    """Another dtype, shape or content."""
    choices: tuple[Callable[[], Tensor], ...] = (
        lambda: tensor.to(rng.choice(DTYPES)),
        lambda: tensor.to(rng.choice(DTYPES)),
        lambda: (
            torch.full_like(tensor, rng.choice(FLOATS))
            if tensor.is_floating_point()
            else torch.full_like(tensor, rng.choice((-1, 10**6, 0)))
        ),
        lambda: tensor.T if tensor.ndim == 2 else tensor[None],
        lambda: tensor.flatten(),
        lambda: tensor[:0],
        lambda: tensor.flatten()[0] if tensor.numel() else tensor,
        lambda: tensor[1:] if tensor.ndim else tensor,
        lambda: torch.cat([tensor, tensor]) if tensor.ndim else tensor,
        lambda: tensor.reshape(*[1] * 30, *tensor.shape),
        lambda: torch.zeros_like(tensor),
        lambda: tensor.flip(0) if tensor.ndim else -tensor,
        lambda: tensor * rng.choice((-1, 2, 1000)),
    )
    return rng.choice(choices)()


def _mutated_tensors(rng: random.Random, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*tensors] or [""])
        if not name:
            break
        kind = rng.choice(("odd", "odd", "odd", "drop", "rename", "add", "swap"))
        if kind == "drop":
            del tensors[name]
        elif kind == "rename":
            new = ("x", "", "a" * 5000, f"{name}.x", name.replace("0", "7"), "a/b/c/d", "\u2028")
            tensors[rng.choice(new)] = tensors.pop(name)
        elif kind == "add":
            tensors[rng.choice((f"{name}.more", "model.layers.9.x", "/"))] = tensors[name].clone()
        elif kind == "swap":
            tensors[name] = tensors[rng.choice([*tensors])].clone()
        else:
            tensors[name] = odd_tensor(rng, tensors[name])
    return tensors


def mutate_tensors(rng: random.Random, content: bytes) -> Damage:
    """A safetensors file that is whole, but holds other tensors."""
    metadata = json.loads(_parts(content)[0]).get("__metadata__")
    tensors = _mutated_tensors(rng, load_safetensors(content))
    contiguous = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    return Damage("tensors", content=save_safetensors(contiguous, metadata))


def _pickled(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


class _Call:
    """Unpickles by calling a function: it must never be called."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of a checkpoint was run",)


def _oddities(rng: random.Random, tensor: Tensor) -> tuple[Callable[[], object], ...]:
    return (
        lambda: torch.empty(tensor.shape, device="meta"),
        lambda: torch._neg_view(tensor),
        lambda: tensor.to(torch.complex64).conj(),
        lambda: torch.ones(1).expand(2 ** rng.choice((20, 30, 35)), 1000),
        lambda: tensor.to_sparse(),
        lambda: torch.quantize_per_tensor(tensor.flatten(), 0.1, 0, torch.qint8),
        lambda: tensor.as_strided([2**16, 2**16], [0, 0]),
        lambda: torch.nn.Parameter(tensor),
        lambda: rng.choice((None, 1, 1.5, "x", [tensor], {"a": tensor}, (tensor, tensor))),
        lambda: torch.nested.nested_tensor([tensor.flatten(), tensor.flatten()[:3]]),
    )


def mutate_pickle(rng: random.Random, content: bytes) -> Damage:
    """A .bin file with tensors, values, keys or a container that do not belong."""
    tensors: dict[Any, Any] = torch.load(io.BytesIO(content), weights_only=True)
    name = rng.choice([*tensors])
    kind = rng.choice(("tensors", "oddity", "oddity", "key", "container", "legacy", "code"))
    if kind == "tensors":
        return Damage("pickle: tensors", content=_pickled(_mutated_tensors(rng, tensors)))
    if kind == "oddity":
        tensors[name] = rng.choice(_oddities(rng, tensors[name]))()
    elif kind == "key":
        tensors[rng.choice((1, None, 1.5, ("a",), True, "a" * 5000))] = tensors.pop(name)
    elif kind == "legacy":
        old = _pickled(tensors, _use_new_zipfile_serialization=False)
        return Damage("pickle: legacy", content=mutate_bytes(rng, old).content)
    elif kind == "code":
        return Damage("pickle: code", content=_pickled({name: tensors[name], "x": _Call()}))
    elif kind == "container":
        nested = {"state_dict": tensors}
        tensors = rng.choice(([tensors], [*tensors], None, tensors[name], nested, {}, "x"))
    return Damage(f"pickle: {kind}", content=_pickled(tensors))
