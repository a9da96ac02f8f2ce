"""What a fine-tune changed, in BASE's frame; and into OTHER's own coordinates, undoing its frame.

Exact in both directions: the difference is that of the two functions in one frame, so products of
changes (a gain and the map that reads it) are part of it. OTHER keeps its gains, shifts, means and
ties; what is divided by a gain of zero gets a gain of one instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights, Weights
from symmerge.models.canonical.biases import passed_values, passing_values
from symmerge.models.canonical.gains import (
    SMALLEST_GAIN,
    along,
    folded_norms,
    folded_scales,
)
from symmerge.models.model import Model
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Norm, Scale
from symmerge.transporting.frames import Passage, loosened

Computed = dict[str, Callable[[], Tensor]]


def difference(passage: Passage, tuned: Model) -> Weights:
    """TUNED - BASE in BASE's frame; what a changed output map makes of value biases added.

    Lazy. Value biases may sit elsewhere in OTHER: their effect passes into the output bias.
    """
    base, after = passage.start, passage.frame_of(tuned)
    change: Weights = DerivedWeights(
        base.weights,
        {name: partial(_minus, after.weights, base.weights, name) for name in base.weights},
    )
    return _with_values(base, change, 1.0)


def _minus(after: Weights, before: Weights, name: str) -> Tensor:
    return after[name] - before[name]


def _with_values(model: Model, change: Weights, sign: float) -> Weights:
    """The change of each output bias, plus what the changed output map makes of value biases."""
    spec = model.spec
    targets: dict[str, list[str]] = {}
    for target, space in passing_values(spec):
        targets.setdefault(target, []).append(space)

    def compute(target: str) -> Tensor:
        passed = (
            passed_values(spec, target, space, change, model.weights) for space in targets[target]
        )
        return change[target] + sign * sum(passed, torch.zeros(()))

    return DerivedWeights(change, {target: partial(compute, target) for target in targets})


def moved(passage: Passage, change: Weights, scale: Mapping[str, float] | float = 1.0) -> Weights:
    """A change in BASE's frame as the same change in OTHER's, times `scale` (by tensor). Lazy."""

    def compute(name: str) -> Tensor:
        factor = scale if isinstance(scale, float | int) else scale.get(name, 1.0)
        return passage.there.transport(name, change[name]).mul_(factor)

    return DerivedWeights(change, {name: partial(compute, name) for name in change})


def own_change(passage: Passage, change: Weights) -> tuple[Model, Weights]:
    """A change in OTHER's frame as one in its own coordinates; and OTHER, ties broken for it."""
    other = loosened(passage.other.restrict(**(passage.restrict or {})))
    change = _with_values(passage.end, change, -1.0)
    change = DerivedWeights(change, _scales_undone(other, change))
    computed: Computed = {}
    for norm in folded_norms(other, constant=True):
        if norm.writer:
            computed |= _kept_folded(passage.end, other, norm, change)
        elif norm.readers:
            computed |= _Undone(other, norm, change, passage.end).computed()
    return other, DerivedWeights(change, computed)


def _scales_undone(other: Model, change: Weights) -> Computed:
    """Divide by the gains that follow a map, where they were folded into it."""
    computed: Computed = {}
    for scale in folded_scales(other):
        computed[scale.gain] = partial(_gain_changed, other.weights, scale.gain)
        for name in (f"{scale.writer}.weight", f"{scale.writer}.bias"):
            if name in other.spec.tensors:
                axis = other.spec.axis_of(name, scale.stream, Role.WRITES)
                computed[name] = partial(_unscaled, other.weights, change, scale, name, axis)
    return computed


def _unscaled(weights: Weights, change: Weights, scale: Scale, name: str, axis: int) -> Tensor:
    return divided(weights[name], change[name], weights[scale.gain], axis)


def _small(gain: Tensor) -> Tensor:
    """Gains that are too small to divide by."""
    return gain.abs() <= SMALLEST_GAIN * gain.abs().amax()


def _gain_changed(weights: Weights, gain: str) -> Tensor:
    value = weights[gain]
    return torch.where(_small(value), 1 - value, 0)


def divided(weight: Tensor, change: Tensor, gain: Tensor, axis: int) -> Tensor:
    """The change of a map whose product with the gain changes so. A gain of zero becomes one."""
    gain = along(gain, weight.shape[axis])
    gain = gain.reshape([-1 if dim == axis else 1 for dim in range(weight.ndim)])
    small = _small(gain)
    quotient = change / torch.where(small, 1, gain)
    return torch.where(small, weight * (gain - 1) + change, quotient)


@final
@dataclass(frozen=True)
class _Undone:
    """The changes of a norm and its readers in own coordinates: the gain is not folded there."""

    other: Model
    norm: Norm
    change: Weights
    end: Model

    def computed(self) -> Computed:
        norm = self.norm
        computed: Computed = {norm.gain: partial(_gain_changed, self.other.weights, norm.gain)}
        biased = self.other.spec.passes_shift(norm)
        for reader in norm.readers:
            computed[self.other.spec.weight_of(reader)] = partial(self._weight, reader)
            if norm.shift and biased:
                computed[self.other.spec.bias_of(reader)] = partial(self._bias, reader)
        if norm.shift:
            computed[norm.shift] = self._nothing if biased else self._shift
        return computed

    def _axis(self, reader: str) -> int:
        spec = self.other.spec
        return spec.axis_of(spec.weight_of(reader), self.norm.stream, Role.READS)

    def _weight(self, reader: str) -> Tensor:
        weights, name = self.other.weights, self.other.spec.weight_of(reader)
        gain = weights[self.norm.gain]
        return divided(weights[name], self.change[name], gain, self._axis(reader))

    def _bias(self, reader: str) -> Tensor:
        assert self.norm.shift
        weight = self._weight(reader).movedim(self._axis(reader), -1)
        shift = along(self.other.weights[self.norm.shift], weight.shape[-1])
        return self.change[self.other.spec.bias_of(reader)] - weight @ shift

    def _nothing(self) -> Tensor:
        assert self.norm.shift
        return torch.zeros_like(self.other.weights[self.norm.shift])

    def _shift(self) -> Tensor:
        """Of a head without a bias the norm keeps its shift, divided by the gain."""
        assert self.norm.shift
        weights, shift = self.other.weights, self.norm.shift
        gain = weights[self.norm.gain]
        kept = torch.where(_small(gain), 1, gain)
        return (self.end.weights[shift] + self.change[shift]) * kept - weights[shift]


def _kept_folded(end: Model, other: Model, norm: Norm, change: Weights) -> Computed:
    """A norm that the embedding absorbed stays there: the result is stock all the same."""
    names = [f"{norm.writer}.weight", norm.gain, *map(other.spec.weight_of, norm.readers)]
    names += [norm.shift] if norm.shift else []

    def compute(name: str) -> Tensor:
        return end.weights[name] + change[name] - other.weights[name]

    return {name: partial(compute, name) for name in names}
