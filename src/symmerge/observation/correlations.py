"""How similar the features of two models are before and after an alignment: correlations.json.

Statistics hold the products between the models, so an alignment of B can be applied to them.
Variances follow too where coordinates are permuted, flipped or scaled, and inside heads, whose own
moments are known. Where the stream rotates, only the sum of the variances is known; there the
correlation is that of all coordinates together, <A, gB> / (|A| |gB|).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.json_results import OMIT, Record, ResultFile
from symmerge.models.alignment import Alignment
from symmerge.observation.activations import extend_spec
from symmerge.observation.statistics import Statistics
from symmerge.symmetry.groups.linalg import total
from symmerge.symmetry.notation import Atom, Product, atoms
from symmerge.symmetry.spec import layer_of

MAX_FEATURES = 128  # along a side of the matrix


@dataclass(frozen=True)
class LayerCorrelation(Record):
    """Mean correlation of matched features in one layer and kind of space."""

    layer: Annotated[int, "Number of the layer; what follows the last one counts as one more."]
    space: Annotated[str, "Kind of space: `ff`, `qk`, `vo`, `residual`, ..."]
    before: Annotated[float, "Mean correlation of partners in canonical form."]
    after: Annotated[float, "The same after alignment."]


@dataclass(frozen=True)
class CorrelationMatrix(Record):
    """Correlations between the outputs of the heads in the first attention layer."""

    space: Annotated[str, "The space the features are in."]
    values: Annotated[tuple[tuple[float, ...], ...], "Features of A by features of aligned B."]
    borders: Annotated[tuple[int, ...], "Features at which a new head starts."]
    features: Annotated[str | None, OMIT, "Which features these are; at most 128 a side."] = None


@dataclass(frozen=True)
class Correlations(ResultFile):
    """How similar the features of two models are, where a solver gathered statistics."""

    SCHEMA, WRITER = "symmerge.correlations/1", "symmerge align with data"

    layers: Annotated[tuple[LayerCorrelation, ...], "By layer and kind of space."]
    matrix: Annotated[CorrelationMatrix | None, OMIT, "Left out where no heads move."] = None


def measure_correlations(statistics: Statistics, alignment: Alignment) -> Correlations:
    """Mean correlation of matched features per layer and kind of space; one attention matrix.

    The alignment must belong to the form of the models that the statistics were gathered in.
    """
    moving = _Moving(statistics, alignment)
    pairs = defaultdict(list)
    for name, moments in statistics.moments.items():
        pairs[moving.layer(name), _kind(moments.axis)].append(moving.before_and_after(name))
    layers = []
    for (layer, kind), values in sorted(pairs.items()):
        before, after = (sum(side) / len(values) for side in zip(*values, strict=True))
        layers.append(LayerCorrelation(layer, kind, before, after))
    heads = moving.heads()
    return Correlations(tuple(layers), moving.matrix(heads) if heads else None)


class _Moving:
    """Samples that reproduce the statistics' moments; B's before and after its alignment."""

    def __init__(self, statistics: Statistics, alignment: Alignment) -> None:
        self.moments = statistics.moments
        self.sides = statistics.activations("covariance")
        self.alignment = Alignment(extend_spec(alignment.spec, self.sides[0]), alignment.elements)
        layers = [layer for name in self.moments if (layer := layer_of(name)) is not None]
        self.after_last = 1 + max(layers, default=-1)

    def layer(self, name: str) -> int:
        """Layer of an activation; everything after the last layer counts as one more."""
        layer = layer_of(name)
        return self.after_last if layer is None else layer

    def before_and_after(self, name: str) -> tuple[float, float]:
        a, before, after = self._samples(name)
        spread = self._spread(name)
        mean = _joint_correlation if self._rotates(name) else _mean_correlation
        return mean(a, before, spread), mean(a, after, spread)

    def heads(self) -> str | None:
        """The last activation of the first layer that has heads: their output."""
        names = [name for name, moments in self.moments.items() if len(moments.inside)]
        return next((n for n in reversed(names) if self.layer(n) == self.layer(names[0])), None)

    def matrix(self, name: str) -> CorrelationMatrix:
        """The same number of evenly spaced features from every head, up to MAX_FEATURES in all."""
        a, _, b = self._samples(name)
        count, size = self.moments[name].inside.shape[:2]
        count, each = min(count, MAX_FEATURES), min(size, max(1, MAX_FEATURES // count))
        rows = (torch.arange(count)[:, None] * size + torch.arange(each) * size // each).flatten()
        scale = self._spread(name)[rows, None] * b[rows].norm(dim=1)
        values = (a[rows] @ b[rows].T) / scale.clamp_min(1e-30)
        return CorrelationMatrix(
            space=_innermost(self.moments[name].axis),
            values=tuple(tuple(round(value, 4) for value in row) for row in values.tolist()),
            borders=tuple(range(each, count * each, each)),
            features=f"{each} of the {size} features of each head, after alignment",
        )

    def _samples(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        a, b = (side.values[name].cpu() for side in self.sides)
        return a, b, self.alignment.transport(name, b)

    def _spread(self, name: str) -> Float[Tensor, " a"]:
        """Standard deviation of A's features; 0 for constant ones."""
        return self.moments[name].variances[0].sqrt().cpu()

    def _rotates(self, name: str) -> bool:
        moments, spec = self.moments[name], self.alignment.spec
        return not len(moments.inside) and any(
            spec.rotates(atom.space) for atom in atoms((moments.axis,))
        )


def _mean_correlation(
    a: Float[Tensor, "n m"], b: Float[Tensor, "n m"], spread: Float[Tensor, " n"]
) -> float:
    """Mean over features of the correlation with their partner; constant ones are left out."""
    scale = spread * b.norm(dim=1)
    known = scale > 0
    return ((a * b).sum(1)[known] / scale[known]).mean().item() if known.any() else 0.0


def _joint_correlation(
    a: Float[Tensor, "n m"], b: Float[Tensor, "n m"], spread: Float[Tensor, " n"]
) -> float:
    """The correlation of all features at once."""
    size = total(spread.square()).sqrt() * total(b.square()).sqrt()
    return (total(a * b) / size.clamp_min(1e-30)).item()


def _innermost(axis: Product) -> str:
    inner = axis.factors[-1]
    assert isinstance(inner, Atom), "activations are split where their axes are fused"
    return inner.space


def _kind(axis: Product) -> str:
    return _innermost(axis).partition(".")[0]
