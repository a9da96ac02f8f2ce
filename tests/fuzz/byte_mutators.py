"""Mutations of bytes, whatever they mean."""

from __future__ import annotations

import random
from collections.abc import Callable

from fuzz.damage import Damage

ODD = (
    *(b"\0", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b"\x1b[31m", b"\x80"),
    *(b"\0" * 4096, b"\xff" * 64, b"9" * 6000, b"[" * 5000, b'"', b"\\", b"{}", b"PK\x03\x04"),
    *("\u2028".encode(), b"-", b"e999", b"<!--", b"\xed\xa0\x80", b"\xc0\x80"),
)


def _at(rng: random.Random, content: bytes) -> int:
    """A position: anywhere, or near the start, where headers are."""
    last = len(content) if rng.random() < 0.5 else min(len(content), 64)
    return rng.randint(0, last)


def flip(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 4, 32)) if changed else 0):
        changed[min(_at(rng, content), len(changed) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.choice((_at(rng, content), len(content) - 1, len(content) // 2))]


def extend(rng: random.Random, content: bytes) -> bytes:
    return content + rng.choice((*ODD, content, rng.randbytes(100)))


def insert(rng: random.Random, content: bytes) -> bytes:
    at = _at(rng, content)
    return content[:at] + rng.choice(ODD) + content[at:]


def overwrite(rng: random.Random, content: bytes) -> bytes:
    at, odd = _at(rng, content), rng.choice((*ODD, rng.randbytes(8)))
    return content[:at] + odd + content[at + len(odd) :]


def duplicate(rng: random.Random, content: bytes) -> bytes:
    first, last = sorted((_at(rng, content), rng.randint(0, len(content))))
    return content[:last] + content[first:last] * rng.choice((1, 2, 20)) + content[last:]


def delete(rng: random.Random, content: bytes) -> bytes:
    first, last = sorted((_at(rng, content), _at(rng, content)))
    return content[:first] + content[last:]


def shuffle(rng: random.Random, content: bytes) -> bytes:
    """Swap two parts."""
    a, b, c = sorted(rng.randint(0, len(content)) for _ in range(3))
    return content[:a] + content[b:c] + content[a:b] + content[c:]


def empty(rng: random.Random, content: bytes) -> bytes:
    return b""


def noise(rng: random.Random, content: bytes) -> bytes:
    return rng.randbytes(rng.choice((1, 7, 8, 9, 100, 5000)))


def numbers(rng: random.Random, content: bytes) -> bytes:
    """Another number in place of one that is written out."""
    places = [at for at, byte in enumerate(content[:5000]) if 48 <= byte <= 57]
    if not places:
        return flip(rng, content)
    at = rng.choice(places)
    new = rng.choice((b"-1", b"0", b"99999999999", b"1e99", b"9" * 5000, b".5", b"x", b"NaN"))
    return content[:at] + new + content[at + 1 :]


BYTE_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(flip, truncate, extend, insert, overwrite, duplicate, delete, shuffle, empty, noise, numbers),
)


def mutate_bytes(rng: random.Random, content: bytes) -> Damage:
    """One mutation, sometimes two."""
    chosen = [rng.choice(BYTE_MUTATIONS) for _ in range(rng.choice((1, 1, 2)))]
    for one in chosen:
        content = one(rng, content)
    return Damage(f"bytes: {', '.join(one.__name__ for one in chosen)}", content=content)
