"""How alike the features of two models are before and after an alignment, from statistics alone: the content of correlations.json.

The statistics hold the products between the models, so what an alignment does to B's coordinates can be done to them. Variances follow too
wherever coordinates change places, sign or scale, and inside heads, whose own moments are known. Where the stream rotates they are not known
one by one, but their sum stays what it was: there the correlation is that of all coordinates together, <A, gB> / (|A| |gB|).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.models.alignment import Alignment
from symmerge.observation.activations import extend_spec
from symmerge.observation.statistics import Statistics
from symmerge.symmetry.notation import Atom, Product, atoms
from symmerge.symmetry.spec import layer_of

SCHEMA = "symmerge.correlations/1"
LARGEST = 128  # features along a side of the matrix


def measure_correlations(statistics: Statistics, alignment: Alignment) -> dict[str, Any]:
    """For each layer and kind of space the mean correlation of matched features, before and after; and one attention layer's matrix after.

    Preconditions: the alignment is of the form of the models that the statistics are of.
    """
    moving = _Moving(statistics, alignment)
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for name, found in statistics.moments.items():
        rows.setdefault((moving.layer(name), _kind(found.axis)), []).append(
            moving.before_and_after(name)
        )
    means = {
        key: [sum(side) / len(pairs) for side in zip(*pairs, strict=True)]
        for key, pairs in sorted(rows.items())
    }
    layers = [
        {"layer": layer, "space": kind, "before": before, "after": after}
        for (layer, kind), (before, after) in means.items()
    ]
    shown = moving.heads()
    return {"schema": SCHEMA, "layers": layers} | (
        {"matrix": moving.matrix(shown)} if shown else {}
    )


class _Moving:
    """Samples that have the moments of the statistics, with B's before and after it is moved."""

    def __init__(self, statistics: Statistics, alignment: Alignment) -> None:
        self.moments = statistics.moments
        self.sides = statistics.activations("covariance")
        self.alignment = Alignment(extend_spec(alignment.spec, self.sides[0]), alignment.elements)
        self.last = 1 + max(
            (layer for name in self.moments if (layer := layer_of(name)) is not None), default=-1
        )

    def layer(self, name: str) -> int:
        """Where an activation is; what comes after the last layer counts as one more."""
        layer = layer_of(name)
        return self.last if layer is None else layer

    def before_and_after(self, name: str) -> tuple[float, float]:
        a, before, after = self._samples(name)
        spread = self._spread(name)
        mean = _together if self._rotates(name) else _each
        return mean(a, before, spread), mean(a, after, spread)

    def heads(self) -> str | None:
        """The last activation of the first layer that has heads: what they pass on."""
        found = [name for name, moments in self.moments.items() if len(moments.inside)]
        return next(
            (name for name in reversed(found) if self.layer(name) == self.layer(found[0])), None
        )

    def matrix(self, name: str) -> dict[str, Any]:
        """Features of A by features of B after alignment: of every head as many, evenly spaced, as there is room for."""
        a, _, b = self._samples(name)
        count, size = self.moments[name].inside.shape[:2]
        count, each = min(count, LARGEST), min(size, max(1, LARGEST // count))
        picked = (torch.arange(count)[:, None] * size + torch.arange(each) * size // each).flatten()
        values = (a[picked] @ b[picked].T) / (
            self._spread(name)[picked, None] * b[picked].norm(dim=1)
        ).clamp_min(1e-30)
        return {
            "space": _innermost(self.moments[name].axis),
            "values": [[round(value, 4) for value in row] for row in values.tolist()],
            "borders": list(range(each, count * each, each)),
            "features": f"{each} of the {size} features of each head, after alignment",
        }

    def _samples(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        a, b = (side.values[name].cpu() for side in self.sides)
        return a, b, self.alignment.transport(name, b)

    def _spread(self, name: str) -> Float[Tensor, " a"]:
        """The standard deviation of each of A's features; none of those that never change."""
        return self.moments[name].variances[0].sqrt().cpu()

    def _rotates(self, name: str) -> bool:
        found = self.moments[name]
        return not len(found.inside) and any(
            self.alignment.spec.rotates(atom.space) for atom in atoms((found.axis,))
        )


def _each(a: Float[Tensor, "n m"], b: Float[Tensor, "n m"], spread: Float[Tensor, " n"]) -> float:
    """The mean over features of the correlation of each with its partner; one that never changes has none."""
    sizes = spread * b.norm(dim=1)
    known = sizes > 0
    return ((a * b).sum(1)[known] / sizes[known]).mean().item() if known.any() else 0.0


def _together(
    a: Float[Tensor, "n m"], b: Float[Tensor, "n m"], spread: Float[Tensor, " n"]
) -> float:
    """The correlation of all features at once."""
    return ((a * b).sum() / (spread.norm() * b.norm()).clamp_min(1e-30)).item()


def _innermost(axis: Product) -> str:
    inner = axis.factors[-1]
    assert isinstance(inner, Atom), "activations are cut where their axes are fused"
    return inner.space


def _kind(axis: Product) -> str:
    return _innermost(axis).partition(".")[0]
