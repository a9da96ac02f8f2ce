"""Spaces and tables that several kinds of models share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from symmerge.families.base import Reading
from symmerge.symmetry.groups import GeneralLinear, Group, SignedPermutation
from symmerge.symmetry.spec import Space


def regrouped(reading: Reading, **groups: Group) -> Reading:
    """The same with other groups for some spaces."""
    return replace(
        reading,
        spaces=tuple(
            replace(space, group=groups.get(space.name, space.group)) for space in reading.spaces
        ),
    )


def normed_writers(reading: Reading) -> Reading:
    """For blocks that write through an RMSNorm: its gain lies between the norm and the stream.

    It follows the order of the stream and no sign; there is no mean to subtract.
    """
    stream = next(space for space in reading.spaces if space.name == "residual")
    return regrouped(reading, residual=SignedPermutation(stream.group.size))


def without_positions(reading: Reading, layers: Iterable[int], size: int) -> Reading:
    """For layers without rotary positions: queries and keys may change their basis at will."""
    free = GeneralLinear(size)
    spaces = [Space(f"qk.{i}", free, per=f"head.{i}", translation="drops") for i in layers]
    return replace(reading, spaces=(*reading.spaces, *spaces))  # the last of a name holds


def factorised(table: str) -> str:
    """A table whose embeddings, and their norm, are in a space of their own."""
    lines = table.splitlines()
    return "\n".join(
        re.sub(r"\bresidual\b", "embedding", line) if ".embeddings." in line else line
        for line in lines
    )
