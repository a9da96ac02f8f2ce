"""What there is to match: both models' tensors, and how much each counts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.matching.heads import attention_layers
from symmerge.observation.activations import Activations, Score, extend_spec
from symmerge.symmetry.spec import Spec

FAINT = 1e-6  # of the largest squared entries: entries a thousand times smaller


@dataclass(frozen=True)
class Weighting:
    """How much each piece of evidence counts.

    A tensor's squared error is divided by its squared norm to the power `norm`; rows of the vocabulary count by their expected frequency to the
    power `frequency`. Activations count `stream`, `heads` and `units` times as much as the weights that meet the same space; the weights
    themselves count `weights` times (0: activations alone). `score` says how activations are compared. With `all_layers` every layer speaks for
    the stream; without, the tensors that meet nothing else alone do; None leaves it to whether these determine the stream.
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


@dataclass(frozen=True)
class Evidence:
    """Both models' tensors under one weighting; activations are more tensors of the table.

    `frequencies` are the expected frequencies of tokens; those never seen may be left out altogether (`ignore_unseen`).
    """

    table: Spec
    weights: tuple[Weights, Weights]
    weighting: Weighting
    activations: tuple[Activations, ...] = ()
    frequencies: Tensor | None = None
    ignore_unseen: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    _scales: dict[str, float] = field(default_factory=dict)
    _sizes: dict[str, float] = field(default_factory=dict)

    @cached_property
    def spec(self) -> Spec:
        """The table, with the activations if they count."""
        counts = self.weighting.stream or self.weighting.heads or self.weighting.units
        return (
            extend_spec(self.table, self.activations[0])
            if self.activations and counts
            else self.table
        )

    @cached_property
    def certain(self) -> set[str]:
        """Tensors that meet no hidden space but the stream: nothing else has to be matched first."""
        return {name for name in self.spec.tensors if self._spaces(name) == {self.spec.stream}}

    @cached_property
    def determined(self) -> bool:
        """Whether the certain weights have at least as many rows that count as the stream has coordinates."""
        tensors = [
            name
            for name in self.certain
            if name in self.table.tensors and len(self.table.shapes[name]) > 1
        ]
        return sum(self._counting(name) for name in tensors) >= self.spec.sizes[self.spec.stream]

    def _counting(self, name: str) -> int:
        rows = self.rows(name)
        return (
            torch.Size(self.table.shapes[name]).numel() // self.spec.sizes[self.spec.stream]
            if rows is None
            else int((rows > 0).sum())
        )

    def plain(self, name: str) -> tuple[Tensor, Tensor]:
        """A tensor of A and of B as they are."""
        held = (
            (found.values for found in self.activations)
            if name not in self.table.tensors
            else self.weights
        )
        a, b = (side[name].to(self.device, self.dtype) for side in held)
        return a, b

    def rows(self, name: str) -> Tensor | None:
        """The square roots of the weights of a tensor's rows, where they count differently: one row per token."""
        axes = self.table.tensors.get(name, ())
        return (
            self._rows
            if len(axes) > 1 and getattr(axes[0].factors[0], "space", None) == "vocabulary"
            else None
        )

    def sides(self, name: str) -> tuple[Tensor, Tensor]:
        """A tensor of A and of B, rows weighted."""
        a, b = self.plain(name)
        rows = self.rows(name)
        return (a, b) if rows is None else (a * rows.to(a)[:, None], b * rows.to(b)[:, None])

    def scale(self, name: str) -> float:
        """By how much a tensor's squared error is multiplied. A bias counts as its matrix does; a gain by its length."""
        if name not in self._scales:
            is_weight = name in self.table.tensors
            self._scales[name] = (
                self.weighting.weights * self._weight_scale(name)
                if is_weight
                else self._activation_scale(name)
            )
        return self._scales[name]

    def _weight_scale(self, name: str) -> float:
        matrix = name.removesuffix("bias") + "weight"
        reference = (
            matrix if name.endswith("bias") and len(self.table.shapes.get(matrix, ())) > 1 else name
        )
        return (
            max(self._size(reference), self._faint * math.prod(self.table.shapes[reference]))
            ** -self.weighting.norm
        )

    def _activation_scale(self, name: str) -> float:
        space = self._owner(name)
        share = getattr(self.weighting, self._kind(space))
        if not share:
            return 0.0
        peers = [
            other
            for other in self.spec.tensors
            if other not in self.table.tensors and self._owner(other) == space
        ]
        return share * self._total(space) / (len(peers) * self._size(name))

    def _total(self, space: str) -> float:
        """What the weights that meet a space count together."""
        met = [
            name
            for name in self.table.tensors
            if space in self._met(name) and len(self.table.shapes[name]) > 1
        ]
        if space == self.spec.stream:
            met = [
                name for name in met if name in self.certain
            ] or met  # none is certain where an embedding is projected
        return sum(self._weight_scale(name) * self._size(name) for name in met)

    @cached_property
    def _faint(self) -> float:
        """Below this much of an entry a matrix is dead: weight decay may leave layers that are zero but for noise, which must not count as much as others."""
        if not self.weighting.norm:
            return 0.0
        counts = {
            name: math.prod(shape) for name, shape in self.table.shapes.items() if len(shape) > 1
        }
        sizes = [self._size(name) / count for name, count in counts.items() if count]
        return FAINT * max(sizes, default=0.0)

    def _size(self, name: str) -> float:
        if name not in self._sizes:
            a, b = self.sides(name)
            self._sizes[name] = max(
                (a.norm() * b.norm()).item() if a.ndim > 1 else float(a.numel()), 1e-12
            )
        return self._sizes[name]

    def _spaces(self, name: str) -> set[str]:
        return self._met(name) & self.spec.hidden.keys()

    def _met(self, name: str) -> set[str]:
        """Also the spaces that may not move: heads that stay where they are still hold bases that do."""
        return {atom.space for piece in self.spec.pieces[name] for atom in piece.atoms}

    def _owner(self, name: str) -> str:
        """The space an activation speaks for: the heads rather than the bases inside them."""
        outer = {self.spec.spaces[space].per or space for space in self._spaces(name)} - {
            self.spec.stream
        }
        return min(outer, default=self.spec.stream)

    def _kind(self, space: str) -> str:
        if space == self.spec.stream:
            return "stream"
        return "heads" if space in self._attention else "units"

    @cached_property
    def _attention(self) -> set[str]:
        return {layer.heads for layer in attention_layers(self.spec)}

    @cached_property
    def _rows(self) -> Tensor | None:
        """The square roots of the tokens' weights; a token never seen counts as half an occurrence, or not at all."""
        if self.frequencies is None or not (self.weighting.frequency or self.ignore_unseen):
            return None
        weights = (self.frequencies + 0.5) ** self.weighting.frequency
        if self.ignore_unseen:
            weights = weights * (self.frequencies > 0)
        return (weights / weights.mean()).sqrt()
