"""Centre: LayerNorm subtracts the mean, so no map needs to write or read it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.models.canonical.constants import absorb_constants
from symmerge.models.canonical.step import Computed, derived
from symmerge.models.model import Model
from symmerge.symmetry.groups import OrthogonalFixingOnes
from symmerge.symmetry.notation import Product, Role, atoms


def centre(model: Model) -> Model:
    """Take the mean out of maps that write to or read from a LayerNorm stream."""
    model = absorb_constants(model)
    computed: Computed = {}
    kept = {*model.spec.compared, *model.spec.read_means, *_side_by_side(model)}
    untouched = _untouched(model)
    for name, space in model.spec.hidden.items():
        # an inner product of two outputs sees their means
        if not isinstance(space.group, OrthogonalFixingOnes) or name in kept:
            continue
        for occurrence in model.spec.occurrences(name):
            tensor, role = occurrence.piece.tensor, occurrence.role
            if role is not Role.RIDES and tensor not in untouched:
                axis = model.spec.axis_of(tensor, name, role)
                times = _times(model.spec.tensors[tensor][axis], name)
                computed[tensor] = partial(_centred, model.weights, tensor, axis, times)
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


def gather_rows(model: Model) -> Model:
    """Move what all rows of an embedding have in common to one that is added to it (BERT).

    Every token has one row of each, so that their sum stays.
    """
    shared = set(model.spec.ties.values())
    tables = [
        name for name in model.spec.summed if name not in shared and _rows_are_visible(model, name)
    ]
    if len(tables) < 2:
        return model
    first, *others = tables
    computed: Computed = {name: partial(_without_common, model.weights, name) for name in others}
    computed[first] = partial(_with_common, model.weights, first, others)
    what = f"the mean row of {len(others)} embeddings added to another"
    return derived(model, computed, "rows", what)


def _rows_are_visible(model: Model, name: str) -> bool:
    rows, *others = model.spec.tensors[name]
    return len(others) == 1 and not any(atom.space in model.spec.hidden for atom in atoms((rows,)))


def _without_common(weights: Weights, name: str) -> Tensor:
    return weights[name] - weights[name].mean(0)


def _with_common(weights: Weights, name: str, others: list[str]) -> Tensor:
    return weights[name] + sum(weights[other].mean(0) for other in others)


def _stream_axis(model: Model, name: str) -> int:
    """The axis that writes to the stream, which may be visible, or to an embedding's own space."""
    writes = [atom.space for atom in atoms(model.spec.tensors[name]) if atom.role is Role.WRITES]
    stream = {model.spec.stream} & {*writes} or model.spec.hidden.keys()
    return model.spec.axis_of(name, next(each for each in writes if each in stream), Role.WRITES)


def _untouched(model: Model) -> set[str]:
    """Tensors to skip: shifts, and heads whose norm has one, since they read its mean."""
    shifts = {norm.shift for norm in model.spec.norms if norm.shift}
    return shifts | {
        model.spec.weight_of(reader)
        for norm in model.spec.norms
        if norm.shift and model.weights[norm.shift].any()
        for reader in norm.readers
    }


def _side_by_side(model: Model) -> set[str]:
    """Streams of which a norm reads several places at once: it takes out one mean for all."""
    gains = ((norm.stream, model.spec.tensors[norm.gain][0]) for norm in model.spec.norms)
    return {stream for stream, axis in gains if _times(axis, stream) > 1}


def _times(axis: Product, space: str) -> int:
    """How often an axis reads the stream, one time after the other."""
    return sum(atom.space == space for atom in atoms((axis,)))


def _centred(weights: Weights, name: str, axis: int, times: int = 1) -> Tensor:
    tensor = weights[name]
    parts = [part - part.mean(axis, keepdim=True) for part in tensor.chunk(times, axis)]
    return parts[0] if times == 1 else torch.cat(parts, axis)
