"""Pickles from anywhere, read without running what is in them: lists, numbers, strings, and arrays of numbers."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from symmerge.errors import DataError

_NUMBERS = re.compile("[|<=]?[uif][1248]")


def read_plain(file: Path) -> dict[str, Any]:
    """A dictionary that Python 2 or 3 pickled, its arrays as NumPy's. Whatever else a pickle asks for is refused before it is done."""
    try:
        with file.open("rb") as stream:
            found = _Plain(stream, encoding="bytes").load()
        return {
            key.decode() if isinstance(key, bytes) else str(key): value.content
            if isinstance(value, _Array)
            else value
            for key, value in found.items()
        }
    except DataError as error:
        raise DataError(
            f"{file} {error}: get it again from where the data set is published"
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(
            f"{file} is no pickle of a data set ({type(error).__name__}: {error}): is it complete? Get it again"
        ) from error


class _Array:
    """Stands in for NumPy's own while a pickle is read: of an array only its bytes, their kind and its shape are taken."""

    def __init__(self, *_: Any) -> None:
        self.content = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_columns, content = state
        self.content = _array(content, kind, shape, "F" if by_columns else "C")


class _Kind:
    """Stands in for NumPy's dtype."""

    def __init__(self, name: bytes | str, *_: Any) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if (order := state[1]) in (b">", ">"):
            raise DataError(f"has numbers of the byte order {order!r}")


def _array(content: Any, kind: _Kind, shape: tuple[int, ...], order: Any) -> np.ndarray:
    if not isinstance(content, bytes | bytearray) or not _NUMBERS.fullmatch(kind.name):
        raise DataError(f"has an array of {kind.name}, not of numbers")
    return np.frombuffer(content, kind.name).reshape(shape, order=order)


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    return text.encode("latin-1")


# what a pickle may ask for; NumPy 2 has moved its own
_NUMPY = {"multiarray._reconstruct": _Array, "numeric._frombuffer": _array}
_KNOWN = {
    f"numpy.{core}.{name}": ours for core in ("core", "_core") for name, ours in _NUMPY.items()
}
_KNOWN |= {"numpy.ndarray": _Array, "numpy.dtype": _Kind, "_codecs.encode": _encode}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (asked := f"{module}.{name}") not in _KNOWN:
            raise DataError(f"asks for {asked} when it is read, which data does not")
        return _KNOWN[asked]
