"""Put tensors together that files hold in parts: experts one by one, branches apart."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from symmerge.checkpoints.files import RESTORE
from symmerge.checkpoints.weights import Shape, StoredWeights
from symmerge.errors import CheckpointError
from symmerge.families.parts import Part

Grid = tuple[tuple[str, ...], ...]


@final
@dataclass(frozen=True, repr=False)
class StackedWeights(StoredWeights):
    """Another collection, with some tensors put together from a grid of it: experts by parts."""

    base: StoredWeights
    grids: Mapping[str, str | Grid]

    def names(self) -> list[str]:
        return list(self.grids)

    def shape(self, name: str) -> Shape:
        grid = self.grids[name]
        if isinstance(grid, str):
            return self.base.shape(grid)
        rows, *rest = self.base.shape(grid[0][0])
        return (len(grid), rows * len(grid[0]), *rest)

    def dtype(self, name: str) -> torch.dtype:
        grid = self.grids[name]
        return self.base.dtype(grid if isinstance(grid, str) else grid[0][0])

    def raw(self, name: str) -> Tensor:
        grid = self.grids[name]
        if isinstance(grid, str):
            return self.base.raw(grid)
        return torch.stack([torch.cat([self.base.raw(part) for part in parts]) for parts in grid])

    def select(self, stored_as: Mapping[str, str]) -> StoredWeights:
        return StackedWeights(
            self.base, {name: self.grids[stored] for name, stored in stored_as.items()}
        )


def put_together(weights: StoredWeights, parts: tuple[Part, ...], where: str) -> StoredWeights:
    """The weights under today's names, if they are stored in such parts."""
    whole: dict[str, str | Grid] = {}
    places_by_name: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for stored in weights.names():
        part, match = _part_of(stored, parts)
        if part and match:
            places_by_name[match[1] + part.name][int(match[2]), part.place] = stored
        else:
            whole[stored] = stored
    if not places_by_name:
        return weights
    for name, places in places_by_name.items():
        if name in whole:
            raise CheckpointError(f"{where}: {name} is stored whole and in parts: {RESTORE}")
        whole[name] = _grid(name, places, weights, where)
    return StackedWeights(weights, whole)


def _part_of(stored: str, parts: tuple[Part, ...]) -> tuple[Part | None, re.Match[str] | None]:
    for part in parts:
        if match := re.fullmatch(part.stored, stored):
            return part, match
    return None, None


def _grid(
    name: str, places: Mapping[tuple[int, int], str], weights: StoredWeights, where: str
) -> Grid:
    """The stored names by expert and part; none may be missing, and all must be alike."""
    experts = {expert for expert, _ in places}
    each = {place for _, place in places}
    complete = len(places) == len(experts) * len(each) and max(experts) == len(experts) - 1
    kinds = {(weights.shape(stored), weights.dtype(stored)) for stored in places.values()}
    if not complete or max(each) != len(each) - 1:
        raise CheckpointError(f"{where}: parts of {name} are missing: {RESTORE}")
    if len(kinds) > 1:
        raise CheckpointError(f"{where}: parts of {name} differ in shape or precision: {RESTORE}")
    return tuple(
        tuple(places[expert, place] for place in range(len(each))) for expert in range(len(experts))
    )
