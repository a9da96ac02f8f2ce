"""Today's tensors of files that hold them in parts (experts one by one), or fused with another."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from symmerge.checkpoints.files import RESTORE
from symmerge.checkpoints.weights import Shape, StoredWeights
from symmerge.errors import CheckpointError
from symmerge.families.parts import Fused, Part

Grid = tuple[tuple[str, ...], ...]


class StoredBlock(NamedTuple):
    """One of several equal blocks of rows of a stored tensor."""

    stored: str
    place: int
    blocks: int


@final
@dataclass(frozen=True, repr=False)
class StackedWeights(StoredWeights):
    """Another collection, with some tensors put together from a grid of it, or cut out of one."""

    base: StoredWeights
    grids: Mapping[str, str | StoredBlock | Grid]

    def names(self) -> list[str]:
        return list(self.grids)

    def shape(self, name: str) -> Shape:
        grid = self.grids[name]
        if isinstance(grid, str):
            return self.base.shape(grid)
        if isinstance(grid, StoredBlock):
            rows, *rest = self.base.shape(grid.stored)
            return (rows // grid.blocks, *rest)
        rows, *rest = self.base.shape(grid[0][0])
        return (len(grid), rows * len(grid[0]), *rest)

    def dtype(self, name: str) -> torch.dtype:
        grid = self.grids[name]
        if isinstance(grid, StoredBlock):
            return self.base.dtype(grid.stored)
        return self.base.dtype(grid if isinstance(grid, str) else grid[0][0])

    def raw(self, name: str) -> Tensor:
        grid = self.grids[name]
        if isinstance(grid, str):
            return self.base.raw(grid)
        if isinstance(grid, StoredBlock):
            return self.base.raw(grid.stored).chunk(grid.blocks)[grid.place]
        return torch.stack([torch.cat([self.base.raw(part) for part in parts]) for parts in grid])

    def select(self, stored_as: Mapping[str, str]) -> StoredWeights:
        return StackedWeights(
            self.base, {name: self.grids[stored] for name, stored in stored_as.items()}
        )


def put_together(
    weights: StoredWeights, parts: tuple[Part | Fused, ...], where: str
) -> StoredWeights:
    """The weights under today's names, if they are stored in such parts, or fused."""
    whole: dict[str, str | StoredBlock | Grid] = {}
    places_by_name: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    blocks: dict[str, StoredBlock] = {}
    for stored in weights.names():
        kind, match = _part_of(stored, parts)
        if not kind or not match:
            whole[stored] = stored
        elif isinstance(kind, Part):
            places_by_name[match[1] + kind.name][int(match[2]), kind.place] = stored
        else:
            blocks |= _blocks(match, kind, weights.shape(stored), where)
    if not places_by_name and not blocks:
        return weights
    grids = {name: _grid(name, at, weights, where) for name, at in places_by_name.items()}
    if both := sorted(whole.keys() & (grids | blocks).keys()):
        raise CheckpointError(f"{where}: {both[0]} is stored whole and in parts: {RESTORE}")
    return StackedWeights(weights, {**whole, **grids, **blocks})


def _part_of(
    stored: str, parts: tuple[Part | Fused, ...]
) -> tuple[Part | Fused | None, re.Match[str] | None]:
    for part in parts:
        if match := re.fullmatch(part.stored, stored):
            return part, match
    return None, None


def _blocks(match: re.Match[str], kind: Fused, shape: Shape, where: str) -> dict[str, StoredBlock]:
    """The tensors of today that are blocks of a stored one."""
    stored, count = match[0], len(kind.names)
    if not shape or shape[0] % count:
        raise CheckpointError(
            f"{where}: {stored} has shape {list(shape)}, not {count} equal blocks of rows:"
            f" {RESTORE}"
        )
    return {
        match.expand(name): StoredBlock(stored, at, count) for at, name in enumerate(kind.names)
    }


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
