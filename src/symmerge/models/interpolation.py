"""Means of and straight lines between models with the same table. Nothing is aligned here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep, Parent
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import MismatchError
from symmerge.models.label_sets import with_all_labels
from symmerge.models.model import Model
from symmerge.models.tables import check_same_table
from symmerge.symmetry.notation import Piece
from symmerge.symmetry.spec import Spec

PieceTime = Callable[[Piece], float]
"""The interpolation parameter t of each piece of a tensor."""


def piece_time(spec: Spec, t: float, at: Mapping[str, float]) -> PieceTime:
    """The t of each piece: that in `at` under one of its names, else `t`. Refuses unknown names."""
    names = {
        key for name in spec.tensors for piece in spec.pieces[name] for key in _names(spec, piece)
    }
    if unknown := sorted(at.keys() - names):
        short = [*sorted({name for name in names if "." not in name}), "layer.0", "..."]
        raise MismatchError(
            f"no part called {', '.join(unknown)} in {spec.family}: choose one of"
            f" {', '.join(short)}"
        )
    return lambda piece: next((at[name] for name in _names(spec, piece) if name in at), t)


def piece_name(spec: Spec, piece: Piece) -> str:
    """The most specific name that selects a piece: a space of a layer, or the stream."""
    return _names(spec, piece)[0]


def _names(spec: Spec, piece: Piece) -> list[str]:
    """The names that can select a piece, most specific first."""
    hidden = [atom.space for atom in piece.atoms if atom.space in spec.hidden]
    inner = [space for space in hidden if space != spec.stream]
    inner.sort(key=lambda name: spec.spaces[name].per is None)
    layers = [f"layer.{name.partition('.')[2]}" for name in inner if "." in name]
    kinds = [name.partition(".")[0] for name in inner]
    return [*inner, *layers[:1], *kinds] or hidden


def between(a: Model, b: Model, time: PieceTime, name: str) -> Tensor:
    """One tensor on the line from `a` to `b`, each piece at its own t."""
    x, y = a.weights[name], b.weights[name]
    pieces = a.spec.pieces[name]
    if len(pieces) == 1:
        return torch.lerp(x, y.to(x), time(pieces[0]))
    result = torch.empty_like(x)
    for piece in pieces:
        piece.view(result).copy_(torch.lerp(piece.view(x), piece.view(y.to(x)), time(piece)))
    return result


def interpolate(a: Model, b: Model, t: float = 0.5) -> Model:
    """The model at `t` on the straight line from `a` (t = 0) to `b` (t = 1). Lazy."""
    check_same_table([a, b])
    a, b = with_all_labels([a, b])
    computed = {name: partial(between, a, b, lambda piece: t, name) for name in a.weights}
    step = merge_step([a, b], [1 - t, t], f"{1 - t:g} x {a.where}, {t:g} x {b.where}")
    return a.derive(DerivedWeights(a.weights, computed), step=step)


def mean(models: Sequence[Model], weights: Sequence[float] | None = None) -> Model:
    """A weighted mean of models with the same table; equal weights by default. Lazy."""
    weights = list(weights) if weights is not None else [1 / len(models)] * len(models)
    if len(weights) != len(models):
        raise MismatchError(
            f"{len(models)} models but {len(weights)} weights: give one weight per model"
        )
    check_same_table(models)
    models = with_all_labels(models)
    computed = {name: partial(_mean, models, weights, name) for name in models[0].weights}
    names = ", ".join(
        f"{weight:g} x {model.where}" for model, weight in zip(models, weights, strict=True)
    )
    return models[0].derive(
        DerivedWeights(models[0].weights, computed), step=merge_step(models, weights, names)
    )


def merge_step(
    models: Sequence[Model],
    weights: Sequence[float],
    what: str,
    *,
    evidence: Mapping[str, object] | None = None,
    details: Mapping[str, object] | None = None,
) -> HistoryStep:
    """The record of a merge: what was done, and to which parents."""
    parents = tuple(
        Parent(model.where, model.digest(), weight, model.history, model.license)
        for model, weight in zip(models, weights, strict=True)
    )
    return HistoryStep("merge", what, parents, evidence or None, details or {})


def _mean(models: Sequence[Model], weights: Sequence[float], name: str) -> Tensor:
    return weighted_sum((model.weights[name] for model in models), weights)


def weighted_sum(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted sum in the first tensor's precision; pass a generator to hold only two tensors."""
    total: Tensor | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        total = tensor * weight if total is None else total.add_(tensor.to(total), alpha=weight)
    assert total is not None
    return total
