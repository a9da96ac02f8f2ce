"""Tensors that files hold in parts: transformers 5 keeps the experts of a layer in one tensor."""

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
