"""What every step of the canonical form returns: a derived model and a record of the step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.models.model import Model

Computed = dict[str, Callable[[], Tensor]]


def derived(model: Model, computed: Computed, step: str, what: str) -> Model:
    """The model with these tensors computed; the same model if there are none."""
    if not computed:
        return model
    return model.derive(DerivedWeights(model.weights, computed), step=HistoryStep(step, what))
