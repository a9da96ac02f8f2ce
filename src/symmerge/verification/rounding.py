"""How far rounding moves a model: its weights as if they had been rounded once more.

Every weight gets random noise of the size of its own rounding error, tensor by tensor. What this
does to the logits is the unit in which differences between models are measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from zlib import crc32

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights, Weights, working
from symmerge.models.model import Model

# Spacing of the numbers around w, over w: eps for w = 1, eps / 2 just below 2; this is the root of
# the mean square.
SPACING = 0.7355
# Products round, too: by this many units of the precision they are computed in. In float64, where
# nothing else does, some steps (solving for a basis) lose a digit more.
COMPUTED = {torch.float32: 32.0, torch.float64: 64.0}
LENGTH = 1_048_573  # a prime, so that rows of no tensor get the same noise


def rounded_again(model: Model, seed: int, dtype: torch.dtype) -> Model:
    """The model with the noise of one rounding on every weight; `dtype` is computed in. Lazy."""
    computed = {name: partial(_noisy, model.weights, name, seed, dtype) for name in model.weights}
    return replace(model, weights=DerivedWeights(model.weights, computed))


def relative_rounding(stored: torch.dtype, *computed_in: torch.dtype) -> float:
    """The width of the interval of rounding errors, relative to a weight."""
    computed = max(
        COMPUTED[kind] * torch.finfo(kind).eps for kind in map(working, (stored, *computed_in))
    )
    return max(SPACING * torch.finfo(stored).eps, computed)


def _noisy(weights: Weights, name: str, seed: int, dtype: torch.dtype) -> Tensor:
    tensor = weights[name]
    width = relative_rounding(weights.dtype(name), dtype)
    flat, noise = tensor.flatten(), _noise(seed)
    result, start, done = torch.empty_like(flat), crc32(name.encode()) % LENGTH, 0
    while done < len(flat):
        count = min(LENGTH - start, len(flat) - done)
        part = noise[start : start + count].to(flat)
        old, new = flat[done : done + count], result[done : done + count]
        # In float32 a factor this close to 1 would lose most of its digits.
        torch.addcmul(old, old, part, value=width, out=new)
        start, done = 0, done + count
    return result.reshape(tensor.shape)


@lru_cache(maxsize=4)
def _noise(seed: int) -> Tensor:
    """Uniform between -1/2 and 1/2."""
    return torch.rand(LENGTH, generator=torch.Generator().manual_seed(seed)) - 0.5
