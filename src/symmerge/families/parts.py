"""Tensors that files hold otherwise: in parts (experts one by one), or fused with another."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """What files hold for one expert: of which tensor of today it is a part, and at which place.

    `stored` is a pattern with a group for the prefix of the layer and one for the expert's number;
    `name` is what follows that prefix today. Parts of an expert follow each other by `place`.
    """

    stored: str
    name: str
    place: int = 0


class Fused(NamedTuple):
    """What files hold as one tensor: its blocks of rows, one after the other, are today's tensors.

    `stored` is a pattern; `names` are what its blocks are called, as in `re.sub`.
    """

    stored: str
    names: tuple[str, ...]
