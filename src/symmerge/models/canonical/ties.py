"""Untie: give tensors that share weights their own copies."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, Weights
from symmerge.models.model import Model, rebind


def untie(model: Model) -> Model:
    """Give every tied tensor its own copy, to be transformed separately. The checkpoint grows."""
    if not model.spec.ties:
        return model
    return own_copies(model, list(model.spec.ties), "so that what it reads can move by itself")


def own_copies(model: Model, aliases: list[str], reason: str) -> Model:
    """Give these tied tensors their own copies; of a custom module, all of them."""
    aliases = list(model.spec.ties) if model.custom else aliases
    weights, shared = model.weights, {alias: model.spec.ties[alias] for alias in aliases}
    untied = DerivedWeights(
        weights,
        {alias: partial(_copy, weights, target) for alias, target in shared.items()},
        added={alias: (weights.shape(name), weights.dtype(name)) for alias, name in shared.items()},
    )
    what = "; ".join(f"{alias} no longer shares {target}" for alias, target in shared.items())
    config = {**model.config, "tie_word_embeddings": False}
    return rebind(model, config, untied, step=HistoryStep("untie", f"{what}: {reason}"))


def _copy(weights: Weights, name: str) -> Tensor:
    return weights[name]
