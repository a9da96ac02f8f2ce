"""Mutations of data: arrays, images, compressed text, tables, YAML."""

from __future__ import annotations

import io
import lzma
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image

from fuzz.byte_mutators import mutate_bytes
from fuzz.damage import Damage
from fuzz.json_mutators import mutate_document

SHAPES = (b"(2147483647,)", b"(99999999999, 9)", b"(-1,)", b"(0,)", b"()", b"(1e9,)", b"(True,)")
DTYPES = ("f2", "f8", "i8", "u2", "?", "S3", "U3", "c8", "M8[s]", "V4", ">f4", "i1")


def _odd_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    choices: tuple[Callable[[], np.ndarray], ...] = (
        lambda: array.astype(rng.choice(DTYPES)),
        lambda: array[:0],
        lambda: array[1:],
        lambda: array[..., None],
        lambda: array.reshape(-1),
        lambda: np.array(array.reshape(-1)[0] if array.size else 0),
        lambda: np.full_like(array.astype("f4"), rng.choice((np.nan, np.inf, 1e38, -1, 0.5))),
        lambda: array.astype("i8") * rng.choice((-1, 10**6)),
        lambda: array.astype(object),
        lambda: np.zeros(3, dtype=[("a", "i4"), ("b", "f4")]),
        lambda: np.array(["a", "b", "\ud800"]),
        lambda: np.broadcast_to(array, (2, *array.shape)),
    )
    with np.errstate(all="ignore"):
        return rng.choice(choices)()


def _claimed(rng: random.Random, npy: bytes) -> bytes:
    """Another shape in the header of an array; lengths stay as they are."""
    first, last = npy.index(b"'shape': (") + 9, npy.index(b")", npy.index(b"'shape': ("))
    room = last + 1 - first
    return npy[:first] + rng.choice(SHAPES)[:room].ljust(room) + npy[last + 1 :]


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def mutate_npy(rng: random.Random, content: bytes) -> Damage:
    if rng.random() < 0.3:
        return Damage("npy: header", content=_claimed(rng, content))
    return Damage("npy: array", content=_npy(_odd_array(rng, np.load(io.BytesIO(content)))))


def _zipped(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


@cache
def _npz_bomb() -> bytes:
    """Ten thousand black images of 256 x 256: two gigabytes in two megabytes."""
    file, header = io.BytesIO(), io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": (10_000, 256, 256, 3)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as entry:
            entry.write(header.getvalue())
            for _ in range(1875):
                entry.write(bytes(1 << 20))
        archive.writestr("y.npy", _npy(np.zeros(10_000, "i8")))
    return file.getvalue()


def mutate_npz(rng: random.Random, content: bytes) -> Damage:
    """Arrays that do not belong, names, impossible headers, bombs, encryption."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([*files])
    kind = rng.choice(("array", "array", "array", "header", "name", "bytes", "bomb", "encrypted"))
    if kind == "array":
        files[name] = mutate_npy(rng, files[name]).content
    elif kind == "header":
        files[name] = _claimed(rng, files[name])
    elif kind == "name":
        files[rng.choice(("a.npy", "x", "../x.npy", "\u2028.npy"))] = files.pop(name)
    elif kind == "bytes":
        files[name] = mutate_bytes(rng, files[name]).content
    elif kind == "bomb":
        return Damage("npz: bomb", content=_npz_bomb())
    changed = bytearray(_zipped(files))
    if kind == "encrypted":
        changed[6] |= 1
        changed[changed.index(b"PK\x01\x02") + 8] |= 1
    return Damage(f"npz: {kind}", content=bytes(changed))


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def _claimed_png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with little in it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = _png_chunk(b"IHDR", header) + _png_chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + body + _png_chunk(b"IEND", b"")


def mutate_image(rng: random.Random, content: bytes) -> Damage:
    """Other modes, sizes and formats, or a size that is only claimed."""
    if rng.random() < 0.4:
        sides = rng.choice(((0, 5), (10**5, 10**5), (20_000, 20_000), (2**31 - 1, 1), (9000, 9000)))
        return Damage("image: claimed size", content=_claimed_png(*sides))
    image = Image.open(io.BytesIO(content))
    mode = rng.choice(("1", "L", "P", "RGBA", "LA", "CMYK", "I", "F", "I;16", "YCbCr"))
    side = rng.choice((1, 3, 16, 500))
    saved_as = {"CMYK": "TIFF", "F": "TIFF", "YCbCr": "JPEG"}.get(mode, "PNG")
    file = io.BytesIO()
    image.convert("L" if mode == "I;16" else mode).resize((side, side)).save(file, saved_as)
    return Damage(f"image: {mode}", content=file.getvalue())


def mutate_xz(rng: random.Random, content: bytes) -> Damage:
    """Damaged text, cut streams, and bombs: streams one after another count as one file."""
    if rng.random() < 0.3:
        stream = lzma.compress(b"a" * 4_000_000, preset=0)
        return Damage("xz: bomb", content=stream * 500)
    text = mutate_bytes(rng, lzma.decompress(content)).content
    return Damage("xz: text", content=lzma.compress(text, preset=0))


def mutate_table(rng: random.Random, content: bytes) -> Damage:
    """Cells, columns and lines of a table."""
    lines = content.decode().split("\n")
    at = rng.randrange(len(lines))
    cells = (*("", "x", "-1", "nan", "1e999", "9" * 5000, '"', "\t", ",", "\0", "label", "\u2028"),)
    choices: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(cells) + lines[at][1:],
        lambda: lines[at] + rng.choice(cells),
        lambda: rng.choice(("\t", ",", "")).join(rng.choice(cells) for _ in range(3)),
        lambda: lines[at] * 3,
        lambda: "x" * 200_000 + lines[at],
    )
    lines[at] = rng.choice(choices)()
    return Damage("table: cells", content="\n".join(lines).encode())


YAML = (
    *(
        "a: &a [*a]",
        "? [x]\n: 1",
        "!!python/object/apply:os.system ['touch run']",
        "\t- x",
        "---\n---",
    ),
    *(
        "seed: !!int 9e9",
        "seed: 0x7fffffffffffffffff",
        "seed: 1:30",
        "seed: .nan",
        "seed: 2020-01-01",
    ),
    *(
        "[" * 3000,
        "{" * 3000,
        "- " * 3000 + "x",
        "a:\n" * 2000,
        "seed: |\n  x",
        "%YAML 9.9\n---\nx: 1",
    ),
    "\n".join(
        ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    ),
    "\n".join(
        ["a0: &a0 {x: 1, y: 2}"]
        + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    ),
)


def mutate_yaml(rng: random.Random, content: bytes) -> Damage:
    """Options as JSON with values that do not belong, and what only YAML has."""
    if rng.random() < 0.3:
        return Damage("yaml: odd", content=rng.choice(YAML).encode())
    return Damage("yaml: values", content=mutate_document(rng, content))
