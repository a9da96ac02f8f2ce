"""Mutations of JSON values at random paths: types, sizes, depth, keys."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from fuzz.damage import Damage

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 0.5, -0.5, 1e-300, 1e308),
    *(2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**9, 10**30, 10**400),
    *("", "x", "0", "1", "true", "null", "nan", "1e9", "../x", "/etc/hostname", "a/b", "."),
    *("[/x]", "[bold]", "\n", "\0", "\ud800", "é→", "{}", "%s", "x" * 300, "x" * 100_000),
    *([], {}, [None], [[]], {"": None}, {"a": 1}, [1] * 1000, [0, 1], ["x", "y"], [1.5, "x"]),
)
RAW = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-0", "9" * 5000, "[" * 400 + "]" * 400),
    *("[" * 100_000 + "]" * 100_000, '{"a":' * 300 + "1" + "}" * 300),
)
"""Text that json.dumps does not write."""


@dataclass(frozen=True)
class Spot:
    """One value of a document, by its container."""

    container: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.container[self.key]

    def set(self, value: Any) -> None:
        self.container[self.key] = value


def random_spot(rng: random.Random, document: Any) -> Spot | None:
    """Walk down from the top, stopping at random: every level has the same weight."""
    spot = None
    while isinstance(document, dict | list) and document:
        keys = [*document] if isinstance(document, dict) else range(len(document))
        spot = Spot(document, rng.choice(keys))
        document = spot.value
        if rng.random() < 0.2:
            break
    return spot


def another_value(rng: random.Random, spot: Spot, markers: list[str]) -> None:
    if rng.random() < 0.2:
        markers.append(rng.choice(RAW))
        spot.set(f"\0{len(markers) - 1}\0")
    else:
        spot.set(deepcopy(rng.choice(VALUES)))


def another_type(rng: random.Random, spot: Spot, markers: list[str]) -> None:
    value = spot.value
    spot.set(rng.choice((str(value), [value], {"x": value}, [value, value], bool(value))))


def another_number(rng: random.Random, spot: Spot, markers: list[str]) -> None:
    value = spot.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return another_value(rng, spot, markers)
    changed = (-value, value + 1, value - 1, value * 2, value * 1000, value / 2, float(value))
    return spot.set(rng.choice((*changed, value * 10**9, str(value))))


def remove(rng: random.Random, spot: Spot, markers: list[str]) -> None:
    del spot.container[spot.key]


def rename(rng: random.Random, spot: Spot, markers: list[str]) -> None:
    if not isinstance(spot.container, dict):
        return spot.container.append(spot.value)
    names = ("", "x", f"{spot.key}_", str(spot.key).upper(), "schema", "\ud800", "k" * 5000)
    spot.container[rng.choice(names)] = spot.container.pop(spot.key)
    return None


def swap(rng: random.Random, spot: Spot, markers: list[str]) -> None:
    """Take the value of a sibling."""
    keys = [*spot.container] if isinstance(spot.container, dict) else range(len(spot.container))
    spot.set(deepcopy(spot.container[rng.choice(keys)]))


def repeat(rng: random.Random, spot: Spot, markers: list[str]) -> None:
    if isinstance(spot.value, list):
        return spot.set(spot.value * rng.choice((0, 2, 50)))
    if isinstance(spot.value, dict):
        return spot.set({f"{name}{n}": one for n in range(3) for name, one in spot.value.items()})
    return spot.set([spot.value] * 3)


def inner(rng: random.Random, spot: Spot, markers: list[str]) -> None:
    """Mutate JSON that is stored in a string."""
    if _is_document(spot.value):
        changed = mutate_document(rng, spot.value.encode())
        return spot.set(changed.decode("utf-8", "replace"))
    return another_value(rng, spot, markers)


OPERATIONS: tuple[Callable[[random.Random, Spot, list[str]], None], ...] = (
    *(another_value, another_value, another_type, another_number, another_number),
    *(remove, rename, swap, repeat, inner),
)


def mutate_document(rng: random.Random, content: bytes) -> bytes:
    """One to three mutations of a document."""
    document, markers = json.loads(content), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spot = random_spot(rng, document)
        if spot is not None:
            operation = inner if _is_document(spot.value) else rng.choice(OPERATIONS)
            operation(rng, spot, markers)
    if rng.random() < 0.03:
        document = rng.choice((document, [document], None, 1, "x", []))
    return _render(document, markers).encode("utf-8", "surrogatepass")


def _is_document(value: object) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False


def _render(document: object, markers: list[str]) -> str:
    text = json.dumps(document)
    for number, raw in _last_first(markers):
        text = text.replace(json.dumps(f"\0{number}\0"), raw)
    return text


def _last_first(markers: list[str]) -> Iterator[tuple[int, str]]:
    return reversed([*enumerate(markers)])


def mutate_json(rng: random.Random, content: bytes) -> Damage:
    return Damage("json: values", content=mutate_document(rng, content))


def mutate_json_lines(rng: random.Random, content: bytes) -> Damage:
    """Mutations of one line of a JSONL file."""
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = mutate_document(rng, lines[at])
    return Damage("json: lines", content=b"\n".join(lines))
