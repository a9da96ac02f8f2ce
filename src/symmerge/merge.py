"""Average models that lie in one basin. Nothing is aligned here; give it aligned models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from symmerge.errors import MismatchError
from symmerge.model import Model
from symmerge.weights import DerivedWeights


def merge(a: Model, b: Model, t: float = 0.5) -> Model:
    """The model at `t` on the straight line from `a` (t = 0) to `b` (t = 1). Lazy."""
    return mean([a, b], [1 - t, t])


def mean(models: Sequence[Model], weights: Sequence[float] | None = None) -> Model:
    """A weighted mean of models with the same table; equal weights unless given. Lazy: tensors are averaged as they are read."""
    weights = list(weights) if weights is not None else [1 / len(models)] * len(models)
    if len(weights) != len(models):
        raise MismatchError(f"{len(models)} models but {len(weights)} weights: give one weight per model")
    first = models[0]
    for other in models[1:]:
        if other.spec.fingerprint != first.spec.fingerprint:
            raise MismatchError(f"{first.where} and {other.where} cannot be merged; they differ in: {'; '.join(first.spec.differences(other.spec))}")
    computed = {name: partial(_mean, models, weights, name) for name in first.weights}
    names = ", ".join(f"{weight:g} x {model.where}" for model, weight in zip(models, weights, strict=True))
    step = {
        "step": "merge",
        "what": names,
        "parents": [{"where": m.where, "weight": w, "steps": list(m.history)} for m, w in zip(models, weights, strict=True)],
    }
    return first.derive(DerivedWeights(first.weights, computed), step=step)


def _mean(models: Sequence[Model], weights: Sequence[float], name: str) -> Tensor:
    total = models[0].weights[name] * weights[0]
    for model, weight in zip(models[1:], weights[1:], strict=True):
        total = total.add_(model.weights[name].to(total), alpha=weight)
    return total


def distance(a: Model, b: Model) -> float:
    """|weights A - weights B| over the root of their norms' product: 0 for equal, about 1.4 for unrelated models."""
    apart, sizes = 0.0, [0.0, 0.0]
    for name in a.weights:
        x, y = a.weights[name], b.weights[name]
        apart += (x - y).square().sum().item()
        sizes = [size + side.square().sum().item() for size, side in zip(sizes, (x, y), strict=True)]
    return (apart / max((sizes[0] * sizes[1]) ** 0.5, 1e-30)) ** 0.5


def distances(a: Model, b: Model) -> Mapping[str, Any]:
    """The same by space: over the tensors that meet each hidden space, layers together."""
    squares: dict[str, list[float]] = {}
    for name in a.weights:
        x, y = a.weights[name], b.weights[name]
        met = {atom.space.partition(".")[0] for piece in a.spec.pieces[name] for atom in piece.atoms if atom.space in a.spec.hidden}
        for space in met:
            row = squares.setdefault(space, [0.0, 0.0, 0.0])
            for at, value in enumerate(((x - y), x, y)):
                row[at] += value.square().sum().item()
    return {space: (row[0] / max((row[1] * row[2]) ** 0.5, 1e-30)) ** 0.5 for space, row in squares.items()}
