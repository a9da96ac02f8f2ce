"""Bases, fine-tunes and other bases for the tests of transport."""

from functools import cache, partial

import torch

import symmerge as sm
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.lab.small_models import small_model
from symmerge.models.canonical.biases import passed_values, passing_values
from symmerge.models.canonical.gains import along
from symmerge.models.orbit import random_member
from symmerge.symmetry.notation import Role
from symmerge.transporting.frames import Passage
from symmerge.verification.inputs import samples
from symmerge.verification.modules import logits_of


@torch.no_grad()
def fine_tuned(module, size=0.3, seed=77):
    """Every weight, gain and bias changed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in filter(lambda one: one.requires_grad, module.parameters()):
        spread = parameter.std(unbiased=False).clamp_min(0.05)
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.add_(size * spread * noise)
    return module


@cache
def base_of(name, dtype=torch.float64):
    return sm.load(small_model(name, dtype=dtype))


@cache
def tuned_of(name, dtype=torch.float64):
    return sm.load(fine_tuned(small_model(name, dtype=dtype)))


@cache
def orbit(name, seed=3):
    """A random member of a base's orbit, and the way there."""
    element, member = random_member(base_of(name), seed)
    return Passage(base_of(name), member, element.inverse())


def own_coordinates(model, seed=0):
    """The same function with random gains and shifts, means and value biases of its own."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    spec, tensors = model.spec, {name: model.weights[name].clone() for name in model.weights}
    for target, space in passing_values(spec):
        for met in spec.occurrences(space):
            if met.role is Role.WRITES and len(spec.tensors[met.piece.tensor]) == 1:
                before = MemoryWeights({name: value.clone() for name, value in tensors.items()})
                view = met.piece.view(tensors[met.piece.tensor])
                view.add_(0.3 * draw(view.shape))
                after = MemoryWeights(tensors)
                gained = passed_values(spec, target, space, after)
                tensors[target] = (
                    tensors[target] - gained + passed_values(spec, target, space, before)
                )
    for norm in spec.norms:
        if not (spec.rotates(norm.stream) and norm.readers) or norm.writer:
            continue
        biased = bool(norm.shift) and spec.passes_shift(norm)
        gain = (0.3 * draw(tensors[norm.gain].shape)).exp()
        shift = 0.2 * draw(gain.shape) if biased else None
        for reader in norm.readers:
            name = spec.weight_of(reader)
            axis = spec.axis_of(name, norm.stream, Role.READS)
            weight = tensors[name].movedim(axis, -1)
            length = weight.shape[-1]
            if shift is not None:  # the shift that is there has the gain one
                lost = (weight / along(gain, length)) @ along(shift, length)
                tensors[spec.bias_of(reader)] = tensors[spec.bias_of(reader)] - lost
            tensors[name] = (weight / along(gain, length)).movedim(-1, axis).contiguous()
        tensors[norm.gain] = tensors[norm.gain] * gain
        if norm.shift:
            tensors[norm.shift] = (
                shift + tensors[norm.shift] if biased else tensors[norm.shift] * gain
            )
    for scale in spec.scales:
        if spec.rotates(scale.stream):
            gain = (0.3 * draw(tensors[scale.gain].shape)).exp()
            tensors[scale.gain] = tensors[scale.gain] * gain
            for name in (f"{scale.writer}.weight", f"{scale.writer}.bias"):
                if name in spec.tensors:
                    axis = spec.axis_of(name, scale.stream, Role.WRITES)
                    tensors[name] = (tensors[name].movedim(axis, -1) / gain).movedim(-1, axis)
                    tensors[name] = tensors[name].contiguous()
    return model.derive(MemoryWeights(tensors), step=HistoryStep("test", "own coordinates"))


@torch.no_grad()
def answers(model):
    """Its logits in float64, on one sample."""
    return logits_of(model, samples(model, 1)[0], dtype=torch.float64)


def apart(a, b):
    """The largest relative difference of their logits; `b` may be its answers."""
    left, right = answers(a), b if isinstance(b, dict) else answers(b)
    return max(
        float((left[key] - right[key]).norm() / right[key].norm().clamp_min(1e-30)) for key in left
    )
