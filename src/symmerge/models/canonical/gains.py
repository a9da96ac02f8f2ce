"""Fold: gains and shifts of the norms go into the maps that read them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.errors import SymmetryError
from symmerge.models.canonical.absorption import absorb
from symmerge.models.canonical.step import Computed, derived
from symmerge.models.canonical.ties import own_copies
from symmerge.models.model import Model
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Norm

SMALLEST_GAIN = (
    1e-4  # of the largest: dividing a shift by less costs float32 more digits than the gate allows
)


def fold(model: Model) -> Model:
    """Fold every gain on a rotating stream into its readers, so that the norm commutes with rotations."""
    if any(model.spec.rotates(space) for space in model.spec.joined):
        model = own_copies(
            model,
            list(model.spec.ties),
            "what it reads comes out of an activation, and cannot rotate with the embedding",
        )
    norms = [
        norm
        for norm in model.spec.norms
        if model.spec.rotates(norm.stream) and not _commutes(norm, model)
    ]
    model = _untie(model, norms)
    computed, scales = _fold_scales(model)
    shifts = 0
    for norm in norms:
        weights = model.weights
        if not norm.readers:
            unread = {name: value for name, value in ((norm.gain, 1.0), (norm.shift, 0.0)) if name}
            computed |= {
                name: partial(_filled, weights, model.spec.piece_in(name, norm.stream), value)
                for name, value in unread.items()
            }
            continue
        if norm.writer:
            computed |= absorb(model.spec, weights, norm)
            continue
        for reader in norm.readers:
            axis = model.spec.axis_of(f"{reader}.weight", norm.stream, Role.READS)
            computed[f"{reader}.weight"] = partial(
                _scaled, weights, f"{reader}.weight", norm.gain, axis
            )
        computed[norm.gain] = partial(_ones, weights, norm.gain)
        if norm.shift is None:
            continue
        shifts += 1
        if all(f"{reader}.bias" in model.spec.tensors for reader in norm.readers):
            for reader in norm.readers:
                axis = model.spec.axis_of(f"{reader}.weight", norm.stream, Role.READS)
                computed[f"{reader}.bias"] = partial(_pushed, weights, reader, norm.shift, axis)
            computed[norm.shift] = partial(_zeros, weights, norm.shift)
        else:
            _refuse_lost_shift(norm, model)
            computed[norm.shift] = partial(_divided, weights, norm)
    what = f"{len(norms)} gains and {shifts} shifts folded into the maps that read them" + (
        f", {scales} scales into those they follow" if scales else ""
    )
    return derived(model, computed, "fold", what)


def _fold_scales(model: Model) -> tuple[Computed, int]:
    """Gains that follow a map go into it; how many there were."""
    computed: Computed = {}
    scales = [
        scale
        for scale in model.spec.scales
        if model.spec.rotates(scale.stream) and not (model.weights[scale.gain] == 1).all()
    ]
    for scale in scales:
        for name in {f"{scale.writer}.weight", f"{scale.writer}.bias"} & model.spec.tensors.keys():
            computed[name] = partial(
                _scaled,
                model.weights,
                name,
                scale.gain,
                model.spec.axis_of(name, scale.stream, Role.WRITES),
            )
        computed[scale.gain] = partial(_ones, model.weights, scale.gain)
    return computed, len(scales)


def _commutes(norm: Norm, model: Model) -> bool:
    """A constant gain without a shift commutes with rotations as it is; a tied head need not be untied for it."""
    views = [
        model.weights[name]
        if norm.readers
        else model.spec.piece_in(name, norm.stream).view(model.weights[name])
        for name in (norm.gain, norm.shift)
        if name
    ]
    gain, *shift = views
    return bool((gain == gain[0]).all()) and not any(part.any() for part in shift)


def _untie(model: Model, norms: list[Norm]) -> Model:
    """Give a tied head weights of its own where a gain must be folded into it."""
    needed = [
        f"{reader}.weight"
        for norm in norms
        for reader in norm.readers
        if f"{reader}.weight" in model.spec.ties
    ]
    return own_copies(model, needed, "the final gain is folded into it") if needed else model


def _scaled(weights: Weights, name: str, gain: str, axis: int) -> Tensor:
    weight = weights[name]
    return weight * weights[gain].reshape([-1 if dim == axis else 1 for dim in range(weight.ndim)])


def _pushed(weights: Weights, reader: str, shift: str, axis: int) -> Tensor:
    # With the old weight: the shift is added after the gain.
    return (
        weights[f"{reader}.bias"] + weights[f"{reader}.weight"].movedim(axis, -1) @ weights[shift]
    )


def _divided(weights: Weights, norm: Norm) -> Tensor:
    assert norm.shift is not None
    gain, shift = weights[norm.gain], weights[norm.shift]
    return torch.where(
        gain == 0,
        torch.zeros_like(shift),
        shift / torch.where(gain == 0, torch.ones_like(gain), gain),
    )


def _ones(weights: Weights, name: str) -> Tensor:
    return torch.ones_like(weights[name])


def _zeros(weights: Weights, name: str) -> Tensor:
    return torch.zeros_like(weights[name])


def _filled(weights: Weights, piece: Piece, value: float) -> Tensor:
    tensor = weights[piece.tensor].clone()
    piece.view(tensor).fill_(value)
    return tensor


def _refuse_lost_shift(norm: Norm, model: Model) -> None:
    """A zero gain with a shift, read by a map without bias, has nowhere to put that shift; nearly zero, it would lose its digits."""
    assert norm.shift is not None
    gain = model.weights[norm.gain].abs()
    lost = (gain < SMALLEST_GAIN * gain.amax()) & (model.weights[norm.shift] != 0)
    if not lost.any():
        return
    for reader in norm.readers:
        axis = model.spec.axis_of(f"{reader}.weight", norm.stream, Role.READS)
        if model.weights[f"{reader}.weight"].movedim(axis, 0)[lost].any():
            places = ", ".join(str(i) for i in lost.nonzero().flatten()[:4].tolist())
            raise SymmetryError(
                f"{norm.gain} is zero, or too small to divide by, at {places} where {norm.shift} is not, and {reader} has no bias to take it:"
                f" rotations of '{norm.stream}' are not possible; restrict it to permutations"
            )
