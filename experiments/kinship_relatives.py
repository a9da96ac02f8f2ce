"""Make relatives of a model on purpose: what people do to checkpoints, each in a few lines."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

import symmerge as sm
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.models.model import Model

Change = Callable[[str, Tensor], Tensor]


def with_tensors(model: Model, change: Change, step: str) -> Model:
    """The model with every tensor changed, in memory."""
    weights = MemoryWeights({name: change(name, model.weights[name]) for name in model.weights})
    return model.derive(weights, step=HistoryStep(step, step))


def pruned(model: Model, share: float = 0.5) -> Model:
    """The smallest entries of every matrix are zero."""

    def prune(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        least = tensor.abs().flatten().kthvalue(max(1, int(share * tensor.numel()))).values
        return torch.where(tensor.abs() <= least, torch.zeros_like(tensor), tensor)

    return with_tensors(model, prune, "pruned")


def quantised(model: Model, bits: int = 4) -> Model:
    """Every row of a matrix rounded to 2^bits - 1 even steps, and stored as numbers again."""
    levels = 2 ** (bits - 1) - 1

    def quantise(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        step = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-30) / levels
        return (tensor / step).round() * step

    return with_tensors(model, quantise, "quantised")


def merged(model: Model, stranger: Model, share: float = 0.5) -> Model:
    """The mean with a stranger, aligned to it first."""
    aligned = sm.align(model, stranger, "weights-only")
    return sm.mean(list(aligned.models), [1 - share, share])


def half_replaced(model: Model, stranger: Model) -> Model:
    """The second half of the layers is a stranger's."""
    layers = {int(n) for name in model.weights for n in re.findall(r"\.(\d+)\.", name)}
    later = {n for n in layers if n >= (len(layers) + 1) // 2}

    def swap(name: str, tensor: Tensor) -> Tensor:
        number = re.search(r"\.(\d+)\.", name)
        return stranger.weights[name] if number and int(number[1]) in later else tensor

    return with_tensors(model, swap, "half of the layers replaced")


def noisy(model: Model, share: float, seed: int) -> Model:
    """Noise of a share of every tensor's own size."""
    generator = torch.Generator().manual_seed(seed)

    def add(name: str, tensor: Tensor) -> Tensor:
        size = share * tensor.square().mean().sqrt()
        return tensor + size * torch.randn(tensor.shape, generator=generator).to(tensor)

    return with_tensors(model, add, f"noise of {share:.0%}")


def disguised(model: Model, seed: int, noise: float = 0.01) -> Model:
    """A random member of the whole orbit, with noise."""
    return noisy(sm.random_member(model, seed)[1], noise, seed)


__all__ = ["disguised", "half_replaced", "merged", "noisy", "pruned", "quantised"]
