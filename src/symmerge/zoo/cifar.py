"""CIFAR-10 from one file: plain arrays, or the planes of quantised 8x8 cosine transforms that our data folder keeps it in."""

from __future__ import annotations

import lzma
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from symmerge.errors import DataError

_COLOURS = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]], np.float32)  # RGB to YCbCr
_FILTERS = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 22, "lc": 0, "lp": 0, "pb": 0}]
SOME = 5000


def read_cifar(file: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [n, 32, 32, 3] in 8 bits and their classes, of `train` or `test`. Decoding takes 20 s."""
    with np.load(file, allow_pickle=False) as found:
        if f"x_{part}" in found:
            return found[f"x_{part}"], found[f"y_{part}"].astype(np.int64)
        if f"d_{part}" not in found:
            raise DataError(f"{file} has no x_{part} and y_{part}: write them with numpy.savez, pictures as uint8 [n, 32, 32, 3]")
        labels = found[f"y_{part}"].astype(np.int64)
        return _decoded(found[f"d_{part}"].tobytes(), found[f"o_{part}"], len(labels), found["q"]), labels


def _decoded(stored: bytes, offsets: np.ndarray, count: int, steps: Any) -> np.ndarray:
    basis, out = _cosines(), np.empty((count, 32, 32, 3), np.uint8)
    raw = [lzma.decompress(stored[begin:end], format=lzma.FORMAT_RAW, filters=_FILTERS) for begin, end in pairwise(offsets)]
    planes = np.stack([np.frombuffer(plane, np.int8) for plane in raw]).reshape(3, 8, 8, count, 4, 4)
    scale = np.array([steps[0], steps[1], steps[1]], np.float32)[:, None, None, None, None, None]
    back = np.linalg.inv(_COLOURS).T
    for at in range(0, count, SOME):
        coefficients = planes[:, :, :, at : at + SOME].astype(np.float32) * scale
        pictures = np.einsum("ai,bj,cabnhw->nhiwjc", basis, basis, coefficients, optimize=True).reshape(-1, 32, 32, 3)
        out[at : at + SOME] = np.clip(np.rint(pictures @ back + 128), 0, 255)
    return out


def _cosines() -> np.ndarray:
    wave, place = np.arange(8)[:, None], np.arange(8)[None]
    basis = np.cos(np.pi * (2 * place + 1) * wave / 16) * 0.5
    basis[0] /= np.sqrt(2)
    return basis.astype(np.float32)
