"""Untie: give tensors that share weights their own copies."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, Weights
from symmerge.models.model import Model, rebind


def untie(model: Model) -> Model:
    """Give every tied tensor weights of its own: what it reads may then move by itself. The checkpoint grows by them."""
    return (
        own_copies(model, list(model.spec.ties), "so that what it reads can move by itself")
        if model.spec.ties
        else model
    )


def own_copies(model: Model, aliases: list[str], why: str) -> Model:
    shared = {alias: model.spec.ties[alias] for alias in aliases}
    weights = DerivedWeights(
        model.weights,
        {alias: partial(_copy, model.weights, target) for alias, target in shared.items()},
        added={
            alias: (model.weights.shape(target), model.weights.dtype(target))
            for alias, target in shared.items()
        },
    )
    what = "; ".join(f"{alias} no longer shares {target}" for alias, target in shared.items())
    return rebind(
        model,
        {**model.config, "tie_word_embeddings": False},
        weights,
        step=HistoryStep("untie", f"{what}: {why}"),
    )


def _copy(weights: Weights, name: str) -> Tensor:
    return weights[name]
