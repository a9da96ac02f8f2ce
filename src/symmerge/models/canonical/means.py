"""Centre: LayerNorm subtracts the mean, so no map needs to write or read it."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.models.canonical.step import Computed, derived
from symmerge.models.model import Model
from symmerge.symmetry.groups import OrthogonalFixingOnes
from symmerge.symmetry.notation import Role, atoms


def centre(model: Model) -> Model:
    """Take the mean out of maps that write to or read from a LayerNorm stream."""
    computed: Computed = {}
    untouched = _untouched(model)
    for name, space in model.spec.hidden.items():
        if not isinstance(space.group, OrthogonalFixingOnes):
            continue
        for occurrence in model.spec.occurrences(name):
            tensor, role = occurrence.piece.tensor, occurrence.role
            if role is not Role.RIDES and tensor not in untouched:
                axis = model.spec.axis_of(tensor, name, role)
                computed[tensor] = partial(_centred, model.weights, tensor, axis)
    what = f"the mean over the stream taken out of {len(computed)} tensors"
    return derived(model, computed, "centre", what)


def centre_sums(model: Model) -> Model:
    """Take the mean out of what only a LayerNorm on the stream itself reads (BERT)."""
    shared = set(model.spec.ties.values())  # a tied head reads the embedding as well
    computed: Computed = {
        name: partial(_centred, model.weights, name, _stream_axis(model, name))
        for name in model.spec.summed
        if name not in shared
    }
    what = f"the mean taken out of {len(computed)} tensors that only a LayerNorm reads"
    return derived(model, computed, "sums", what)


def _stream_axis(model: Model, name: str) -> int:
    writes = [atom.space for atom in atoms(model.spec.tensors[name]) if atom.role is Role.WRITES]
    space = next(space for space in writes if space in model.spec.hidden)
    return model.spec.axis_of(name, space, Role.WRITES)


def _untouched(model: Model) -> set[str]:
    """Tensors to skip: shifts, and heads whose norm has one, since they read its mean."""
    shifts = {norm.shift for norm in model.spec.norms if norm.shift}
    return shifts | {
        f"{reader}.weight"
        for norm in model.spec.norms
        if norm.shift and model.weights[norm.shift].any()
        for reader in norm.readers
    }


def _centred(weights: Weights, name: str, axis: int) -> Tensor:
    tensor = weights[name]
    return tensor - tensor.mean(axis, keepdim=True)
