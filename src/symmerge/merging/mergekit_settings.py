"""Values of a mergekit config: a number, one per layer (a gradient), or one per kind of tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

ALL = (None, "*")  # filters that every tensor passes


class NotSupported(Exception):
    """A value that means nothing here: where it stands in the file, and why."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} is not supported: {why}")


@final
@dataclass(frozen=True)
class ValueRule:
    """Values for tensors whose name contains `filter`, from the first layer to the last."""

    values: tuple[float, ...]
    filter: str | None = None

    def at(self, depth: float) -> float:
        """The value at a depth from 0 (first layer) to 1 (last), on straight lines in between."""
        place = depth * (len(self.values) - 1)
        below = min(int(place), len(self.values) - 1)
        above = min(below + 1, len(self.values) - 1)
        share = place - below
        return (1 - share) * self.values[below] + share * self.values[above]


@final
@dataclass(frozen=True)
class Setting:
    """A parameter: the first rule whose filter a tensor passes says its value."""

    rules: tuple[ValueRule, ...]

    def at(self, name: str, depth: float) -> float | None:
        """The value for a tensor; None if no rule is for it."""
        for rule in self.rules:
            if rule.filter in ALL or str(rule.filter) in name:
                return rule.at(depth)
        return None

    @property
    def constant(self) -> float | None:
        """The value, if it is the same for all tensors."""
        first, *others = self.rules
        alike = not others and first.filter in ALL and len(set(first.values)) == 1
        return first.values[0] if alike else None


def parse_setting(content: object, where: str) -> Setting:
    """A setting as it stands in a file; refused in words if it is none."""
    if isinstance(content, Mapping):
        content = [content]
    if isinstance(content, Sequence) and not isinstance(content, str):
        if not content:
            raise NotSupported(where, "the list is empty")
        if all(isinstance(item, Mapping) for item in content):
            rules = (_rule(item, f"{where}[{number}]") for number, item in enumerate(content))
            return Setting(tuple(rules))
    return Setting((ValueRule(_numbers(content, where)),))


def _rule(content: object, where: str) -> ValueRule:
    assert isinstance(content, Mapping)
    if unknown := sorted(map(str, content.keys() - {"value", "filter"})):
        raise NotSupported(f"{where}.{unknown[0]}", "a rule has a value and a filter")
    if "value" not in content:
        raise NotSupported(where, "it has no value")
    chosen = content.get("filter")
    if chosen is not None and not isinstance(chosen, str):
        raise NotSupported(f"{where}.filter", "write a part of a tensor's name")
    return ValueRule(_numbers(content["value"], f"{where}.value"), chosen)


def _numbers(content: object, where: str) -> tuple[float, ...]:
    many = isinstance(content, Sequence) and not isinstance(content, str)
    items: Sequence[object] = content if many else [content]  # type: ignore[assignment]
    return tuple(_number(item, where) for item in items)


def _number(item: object, where: str) -> float:
    """A number; YAML reads 1e-7 as text, mergekit takes that for a number, too."""
    try:
        if isinstance(item, bool) or not isinstance(item, int | float | str):
            raise ValueError
        value = float(item)
        if not math.isfinite(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise NotSupported(where, f"{str(item)[:40]!r} is not a number") from None
    return value


def parse_flag(content: object, where: str) -> bool:
    """A setting that is true or false, the same for all tensors."""
    if not isinstance(content, bool):
        raise NotSupported(where, "write true or false")
    return content
