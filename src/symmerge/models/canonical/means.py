"""Centre: LayerNorm subtracts the mean, so no map needs to write or read it."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.models.canonical.step import Computed, derived
from symmerge.models.model import Model
from symmerge.symmetry.groups import (
    OrthogonalFixingOnes,
)
from symmerge.symmetry.notation import Role


def centre(model: Model) -> Model:
    """Take the mean out of what writes to a LayerNorm stream, and the ones direction out of what reads it."""
    computed: Computed = {}
    shifts = {norm.shift for norm in model.spec.norms}
    kept = {
        f"{reader}.weight"
        for norm in model.spec.norms
        if norm.shift and model.weights[norm.shift].any()
        for reader in norm.readers
    }
    for name, space in model.spec.hidden.items():
        if not isinstance(space.group, OrthogonalFixingOnes):
            continue
        for met in model.spec.occurrences(name):
            tensor = met.piece.tensor
            # A head whose norm keeps its shift also reads the shift's ones component: leave it.
            if met.role is Role.RIDES or tensor in shifts or tensor in kept:
                continue
            computed[tensor] = partial(
                _centred, model.weights, tensor, model.spec.axis_of(tensor, name, met.role)
            )
    return derived(
        model, computed, "centre", f"the mean over the stream taken out of {len(computed)} tensors"
    )


def _centred(weights: Weights, name: str, axis: int) -> Tensor:
    tensor = weights[name]
    return tensor - tensor.mean(axis, keepdim=True)
