"""The tensors of both models that a solver matches, and how much each counts."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.arrays import read_npy
from symmerge.checkpoints.json_results import Record
from symmerge.checkpoints.memory import workers
from symmerge.checkpoints.weights import CACHE_BYTES
from symmerge.errors import MismatchError
from symmerge.matching.device_tensors import Tensors
from symmerge.matching.heads import attention_layers
from symmerge.observation.activations import Activations, Score, extend_spec
from symmerge.symmetry.groups.linalg import squares, total
from symmerge.symmetry.spec import Spec
from symmerge.symmetry.threads import side_by_side

FAINT = 1e-6  # relative to the largest mean square of a matrix: entries a thousand times smaller
PEERS = 1e-3  # the same, to that of the same matrix in other layers: entries thirty times smaller


@dataclass(frozen=True)
class Weighting(Record):
    """How much each piece of evidence counts.

    | field | meaning |
    |---|---|
    | `norm` | a tensor's squared error is divided by its squared norm to this power |
    | `frequency` | rows of the vocabulary count by their expected frequency to this power |
    | `stream`, `heads`, `units` | activations of a space count this much times its weights |
    | `weights` | how much the weights count; 0: activations alone |
    | `score` | how activations are compared |
    | `all_layers` | match the stream on all layers, not only on tensors that meet nothing else |
    | | None: only where those tensors do not determine it |
    """

    norm: float = 1.0
    frequency: float = 0.0
    stream: float = 0.0
    heads: float = 0.0
    units: float = 0.0
    weights: float = 1.0
    score: Score = "product"
    all_layers: bool | None = None

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in asdict(self).items()
        )

    @property
    def uses_activations(self) -> bool:
        return bool(self.stream or self.heads or self.units)


MIXED = Weighting(norm=0.5, frequency=0.75, stream=1.0, heads=1.0, units=1.0)
"""Where the search starts if activations of both models are known."""

BY_FREQUENCY = Weighting(norm=0.5, frequency=0.75)
"""The same without activations."""


@final
class CachedSamples(Mapping[str, Tensor]):
    """One model's activations in the precision and on the device of a solver.

    They may be computed on access (statistics: a root of second moments each), so the first
    `CACHE_BYTES` stay in memory, for all sweeps and weightings.
    """

    def __init__(self, values: Mapping[str, Tensor], device: str, dtype: torch.dtype) -> None:
        self._values, self._device, self._dtype, self._room = values, device, dtype, CACHE_BYTES
        self._cache: dict[str, Tensor] = {}

    @staticmethod
    def of(activations: Activations, device: str, dtype: torch.dtype) -> Activations:
        """The same activations, cached."""
        return replace(activations, values=CachedSamples(activations.values, device, dtype))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._cache:
            return self._cache[name]
        values = self._values[name].to(self._device, self._dtype)
        if values.nbytes <= self._room:
            self._room -= values.nbytes
            self._cache[name] = values
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Both models' tensors under one weighting. Activations are further tensors of the table.

    `frequencies` are the expected frequencies of tokens; with `ignore_unseen`, tokens that never
    occur do not count at all.
    """

    table: Spec
    weights: tuple[Tensors, Tensors]
    weighting: Weighting
    activations: tuple[Activations, ...] = ()
    frequencies: Tensor | None = None
    ignore_unseen: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    _scales: dict[str, float] = field(default_factory=dict)
    _sizes: dict[str, float] = field(default_factory=dict)
    _squares_of: dict[str, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def spec(self) -> Spec:
        """The table, with the activations if they count."""
        if self.activations and self.weighting.uses_activations:
            return extend_spec(self.table, self.activations[0])
        return self.table

    @cached_property
    def certain(self) -> set[str]:
        """Tensors that meet no hidden space but one stream, so need no other match first."""
        streams = [{stream} for stream in self.spec.streams]
        return {name for name in self.spec.tensors if self.hidden(name) in streams}

    @cached_property
    def determined(self) -> bool:
        """Whether the certain weights have at least as many rows as each stream coordinates."""
        matrices = [name for name in self.certain & self.table.tensors.keys() if self._matrix(name)]
        return all(
            sum(self._row_count(name) for name in matrices if stream in self.hidden(name))
            >= self.spec.sizes[stream]
            for stream in self.spec.streams
        )

    def plain(self, name: str) -> tuple[Tensor, Tensor]:
        """A tensor of A and of B, unweighted."""
        sides = self.weights
        if name not in self.table.tensors:
            sides = tuple(activations.values for activations in self.activations)
        a, b = (side[name].to(self.device, self.dtype) for side in sides)
        return a, b

    def rows(self, name: str) -> Tensor | None:
        """Square roots of the weights of a tensor's rows, if it has one row per token."""
        axes = self.table.tensors.get(name, ())
        by_token = len(axes) > 1 and getattr(axes[0].factors[0], "space", None) == "vocabulary"
        return self._token_rows if by_token else None

    def sides(self, name: str) -> tuple[Tensor, Tensor]:
        """A tensor of A and of B, with weighted rows."""
        a, b = self.plain(name)
        rows = self.rows(name)
        return (a, b) if rows is None else (a * rows.to(a)[:, None], b * rows.to(b)[:, None])

    def squares(self, name: str) -> tuple[float, float]:
        """The squared norms of a tensor of A and of B, with weighted rows."""
        if name not in self._squares_of:
            a, b = self.sides(name)
            self._squares_of[name] = squares(a), squares(b)
        return self._squares_of[name]

    def scale(self, name: str) -> float:
        """The factor of a tensor's squared error in the objective."""
        if name not in self._scales:
            is_weight = name in self.table.tensors
            self._scales[name] = (
                self.weighting.weights * self._weight_scale(name)
                if is_weight
                else self._activation_scale(name)
            )
        return self._scales[name]

    def _row_count(self, name: str) -> int:
        rows = self.rows(name)
        if rows is not None:
            return int((rows > 0).sum())
        stream = next(one for one in self.spec.streams if one in self._spaces(name))
        return math.prod(self.table.shapes[name]) // self.spec.sizes[stream]

    def _weight_scale(self, name: str) -> float:
        """A bias is weighted as its matrix, a gain by its length.

        What is far below its peers counts with the square of what it carries, not fully.
        """
        matrix = name.removesuffix("bias") + "weight"
        own = self._matrix(matrix) and name.endswith("bias")
        kind, norm = (matrix, self._squares(name)) if own else (name, 0.0)
        size, least = max(self._size(kind), norm), self._least(kind)
        return max(size, least) ** -self.weighting.norm * (min(1.0, size / least) if least else 1.0)

    def _activation_scale(self, name: str) -> float:
        space = self._owner(name)
        share = getattr(self.weighting, self._kind(space))
        if not share:
            return 0.0
        activations = self.spec.tensors.keys() - self.table.tensors.keys()
        peers = [other for other in activations if self._owner(other) == space]
        return share * self._weight_total(space) / (len(peers) * self._size(name))

    def _weight_total(self, space: str) -> float:
        """The total weight of a space's matrices."""
        matrices = [
            name
            for name in self.table.tensors
            if space in self._spaces(name) and self._matrix(name)
        ]
        if space in self.spec.streams:  # no matrix is certain where an embedding is projected
            matrices = [name for name in matrices if name in self.certain] or matrices
        return sum(self._weight_scale(name) * self._size(name) for name in matrices)

    def _least(self, name: str) -> float:
        """The squared norm below which a matrix is little but noise: weight decay leaves such."""
        if not self.weighting.norm:
            return 0.0
        faint = FAINT * max(self._loudest.values(), default=0.0)
        least = max(faint, PEERS * self._loudest.get(_kind_of(name), 0.0))
        return least * math.prod(self.table.shapes[name])

    @cached_property
    def _loudest(self) -> Mapping[str, float]:
        """The largest mean square of each kind of matrix over the layers."""
        loudest: dict[str, float] = defaultdict(float)
        matrices = list(filter(self._matrix, self.table.tensors))
        list(side_by_side(self._size, matrices, workers()))  # kept
        for name in matrices:
            count = math.prod(self.table.shapes[name])
            loudest[_kind_of(name)] = max(loudest[_kind_of(name)], self._size(name) / max(count, 1))
        return loudest

    def _size(self, name: str) -> float:
        """The squared norm of a matrix, geometric mean over both models; the length of a vector."""
        if name not in self._sizes:
            shape = self.spec.shapes[name]
            size = self._squares(name) if len(shape) > 1 else float(math.prod(shape))
            self._sizes[name] = max(size, 1e-12)
        return self._sizes[name]

    def _squares(self, name: str) -> float:
        """The squared norm, geometric mean over both models."""
        a, b = self.squares(name)
        return (a * b) ** 0.5

    def _matrix(self, name: str) -> bool:
        return len(self.table.shapes.get(name, ())) > 1

    def hidden(self, name: str) -> set[str]:
        """The hidden spaces that a tensor meets."""
        return self._spaces(name) & self.spec.hidden.keys()

    def _spaces(self, name: str) -> set[str]:
        """The spaces of a tensor, fixed ones too: heads that stay in place hold bases that move."""
        return {atom.space for piece in self.spec.pieces[name] for atom in piece.atoms}

    def _owner(self, name: str) -> str:
        """The space that sets an activation's weight: heads rather than the bases inside them."""
        spaces = {self.spec.spaces[space].per or space for space in self.hidden(name)}
        streams = {*self.spec.streams}
        return min(spaces - streams, default=min(spaces & streams, default=self.spec.stream))

    def _kind(self, space: str) -> str:
        if space in self.spec.streams:
            return "stream"
        return "heads" if space in self._heads else "units"

    @cached_property
    def _heads(self) -> set[str]:
        return {layer.heads for layer in attention_layers(self.spec)}

    @cached_property
    def _token_rows(self) -> Float[Tensor, " vocabulary"] | None:
        """Square roots of the tokens' weights; a token never seen counts as half an occurrence."""
        if self.frequencies is None or not (self.weighting.frequency or self.ignore_unseen):
            return None
        weights = (self.frequencies + 0.5) ** self.weighting.frequency
        if self.ignore_unseen:
            weights = weights * (self.frequencies > 0)
        return (weights * (len(weights) / total(weights))).sqrt()


def _kind_of(name: str) -> str:
    """A tensor's name without the numbers of its layer."""
    return re.sub(r"\.\d+\.", ".*.", name)


def read_token_counts(path: Path) -> Float[Tensor, " vocabulary"]:
    """How often each token occurred, from a .npy file."""
    counts = read_npy(path, "counts")
    with np.errstate(over="ignore"):
        numbers = counts.astype(np.float32)
    if counts.ndim != 1 or not np.isfinite(numbers).all() or (counts < 0).any():
        raise MismatchError(
            f"{path} holds {counts.dtype} of shape {list(counts.shape)}:"
            " one count per token is needed, none negative or infinite"
        )
    return torch.from_numpy(numbers)
