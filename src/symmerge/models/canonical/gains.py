"""Fold: gains and shifts of the norms go into the maps that read them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.errors import SymmetryError
from symmerge.models.canonical.absorption import absorb
from symmerge.models.canonical.constants import absorb_constants
from symmerge.models.canonical.step import Computed, derived
from symmerge.models.canonical.ties import own_copies
from symmerge.models.model import Model
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Norm, Scale

# Relative to the largest gain: dividing a shift by less costs more float32 digits than the gate
# allows.
SMALLEST_GAIN = 1e-4


def fold(model: Model, *, constant: bool = False) -> Model:
    """Fold gains on a rotating stream into its readers; the norms then commute with rotations.

    `constant` gains commute as they are and stay, unless they shall be folded, too.
    """
    model = absorb_constants(model)
    if any(model.spec.rotates(space) for space in model.spec.joined):
        reason = "what it reads comes out of an activation, and cannot rotate with the embedding"
        model = own_copies(model, list(model.spec.ties), reason)
    norms = folded_norms(model, constant=constant)
    model = _untie_readers(model, norms)
    scales = folded_scales(model)
    computed: Computed = {}
    for scale in scales:
        computed |= _folded_scale(model, scale)
    for norm in norms:
        computed |= _folded_norm(model, norm)
    shifts = sum(bool(norm.shift and norm.readers and not norm.writer) for norm in norms)
    what = f"{len(norms)} gains and {shifts} shifts folded into the maps that read them"
    what += f", {len(scales)} scales into those they follow" if scales else ""
    return derived(model, computed, "fold", what)


def folded_norms(model: Model, *, constant: bool = False) -> list[Norm]:
    """The norms whose gains `fold` folds."""
    return [
        norm
        for norm in model.spec.norms
        if model.spec.rotates(norm.stream)
        and ((constant and norm.readers and not norm.writer) or not _commutes(norm, model))
    ]


def _commutes(norm: Norm, model: Model) -> bool:
    """A constant gain without a shift commutes with rotations; its tied head can stay tied."""

    def read(name: str) -> Tensor:
        tensor = model.weights[name]
        return tensor if norm.readers else model.spec.piece_in(name, norm.stream).view(tensor)

    gain = read(norm.gain)
    return bool((gain == gain[0]).all()) and not (norm.shift and read(norm.shift).any())


def _untie_readers(model: Model, norms: list[Norm]) -> Model:
    """Give a tied head its own weights where a gain goes into it, or into the embedding alone."""
    readers = [model.spec.weight_of(reader) for norm in norms for reader in norm.readers]
    absorbing = {f"{norm.writer}.weight" for norm in norms if norm.writer}
    tied = [
        name for name, target in model.spec.ties.items() if name in readers or target in absorbing
    ]
    return own_copies(model, tied, "the final gain is folded into it") if tied else model


def folded_scales(model: Model) -> list[Scale]:
    """Gains that follow a map to a rotating stream, and are not all one."""
    return [
        scale
        for scale in model.spec.scales
        if model.spec.rotates(scale.stream) and not (model.weights[scale.gain] == 1).all()
    ]


def _folded_scale(model: Model, scale: Scale) -> Computed:
    """Fold a gain into the map that it follows."""
    computed: Computed = {scale.gain: partial(_ones, model.weights, scale.gain)}
    for name in (f"{scale.writer}.weight", f"{scale.writer}.bias"):
        if name in model.spec.tensors:
            axis = model.spec.axis_of(name, scale.stream, Role.WRITES)
            computed[name] = partial(_scaled, model.weights, name, scale.gain, axis)
    return computed


def _folded_norm(model: Model, norm: Norm) -> Computed:
    if norm.writer:
        return absorb(model.spec, model.weights, norm)
    if not norm.readers:
        return _reset(model, norm)
    computed: Computed = {norm.gain: partial(_ones, model.weights, norm.gain)}
    for reader in norm.readers:
        name = model.spec.weight_of(reader)
        axis = model.spec.axis_of(name, norm.stream, Role.READS)
        computed[name] = partial(_scaled, model.weights, name, norm.gain, axis)
    return computed | (_folded_shift(model, norm, norm.shift) if norm.shift else {})


def _reset(model: Model, norm: Norm) -> Computed:
    """Gain one and shift zero: nothing reads this norm on the stream."""
    values = {norm.gain: 1.0} | ({norm.shift: 0.0} if norm.shift else {})
    return {
        name: partial(_filled, model.weights, model.spec.piece_in(name, norm.stream), value)
        for name, value in values.items()
    }


def _folded_shift(model: Model, norm: Norm, shift: str) -> Computed:
    """Fold into the readers' biases; if they cannot take it, it stays, divided by the gain."""
    spec = model.spec
    if not spec.passes_shift(norm):
        _refuse_lost_shift(norm, shift, model)
        return {shift: partial(_divided, model.weights, norm.gain, shift)}
    computed: Computed = {shift: partial(_zeros, model.weights, shift)}
    for reader in norm.readers:
        weight, bias = spec.weight_of(reader), spec.bias_of(reader)
        axis = spec.axis_of(weight, norm.stream, Role.READS)
        computed[bias] = partial(_shifted, model.weights, weight, bias, shift, axis)
    return computed


def _scaled(weights: Weights, name: str, gain: str, axis: int) -> Tensor:
    weight = weights[name]
    factor = along(weights[gain], weight.shape[axis])
    return weight * factor.reshape([-1 if dim == axis else 1 for dim in range(weight.ndim)])


def along(stream: Tensor, length: int) -> Tensor:
    """A vector of the stream for an axis that may read it several times, one after the other."""
    return stream.repeat(length // len(stream))


def _shifted(weights: Weights, name: str, bias: str, shift: str, axis: int) -> Tensor:
    # The old weight, because the shift is added after the gain.
    weight = weights[name].movedim(axis, -1)
    return weights[bias] + weight @ along(weights[shift], weight.shape[-1])


def _divided(weights: Weights, gain: str, shift: str) -> Tensor:
    divisor = weights[gain]
    zero = divisor == 0
    quotient = weights[shift] / torch.where(zero, torch.ones_like(divisor), divisor)
    return torch.where(zero, torch.zeros_like(quotient), quotient)


def _ones(weights: Weights, name: str) -> Tensor:
    return torch.ones_like(weights[name])


def _zeros(weights: Weights, name: str) -> Tensor:
    return torch.zeros_like(weights[name])


def _filled(weights: Weights, piece: Piece, value: float) -> Tensor:
    tensor = weights[piece.tensor].clone()
    piece.view(tensor).fill_(value)
    return tensor


def _refuse_lost_shift(norm: Norm, shift: str, model: Model) -> None:
    """Refuse to divide a shift by a gain of zero, or so near zero that digits are lost."""
    gain = model.weights[norm.gain].abs()
    lost = (gain < SMALLEST_GAIN * gain.amax()) & (model.weights[shift] != 0)
    if not lost.any():
        return
    for reader in norm.readers:
        name = model.spec.weight_of(reader)
        axis = model.spec.axis_of(name, norm.stream, Role.READS)
        if model.weights[name].movedim(axis, 0)[lost].any():
            places = ", ".join(str(i) for i in lost.nonzero().flatten()[:4].tolist())
            raise SymmetryError(
                f"{norm.gain} is zero, or too small to divide by, at {places} where {shift}"
                f" is not, and {reader} has no bias that could take it: rotations of"
                f" '{norm.stream}' are not possible; restrict it to permutations"
            )
