"""How far rounding moves a model: its weights as if they had been rounded once more.

Every weight gets random noise of the size of its own rounding error, tensor by tensor. What this
does to the logits is the unit in which differences between models are measured. A weight that both
models store alike was not rounded: it excuses nothing, and one changed unit or bias is seen.
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


def rounded_again(
    model: Model, seed: int, dtype: torch.dtype, *, other: Model | None = None
) -> Model:
    """The model with the noise of one rounding on its weights; `dtype` is computed in. Lazy.

    Weights that `other` has as well get the noise of computing alone.
    """
    twin = other.weights if other is not None else None
    computed = {name: partial(_noisy, model, twin, name, seed, dtype) for name in model.weights}
    return replace(model, weights=DerivedWeights(model.weights, computed))


def relative_rounding(stored: torch.dtype, *computed_in: torch.dtype) -> float:
    """The width of the interval of rounding errors, relative to a weight."""
    return max(SPACING * torch.finfo(stored).eps, _of_products(stored, *computed_in))


def _of_products(*computed_in: torch.dtype) -> float:
    """The same for the products alone."""
    return max(COMPUTED[kind] * torch.finfo(kind).eps for kind in map(working, computed_in))


def _noisy(model: Model, twin: Weights | None, name: str, seed: int, dtype: torch.dtype) -> Tensor:
    tensor, stored = model.weights[name], model.weights.dtype(name)
    width, least = relative_rounding(stored, dtype), _of_products(stored, dtype)
    flat, noise = tensor.flatten(), _noise(seed, tensor.device)
    alike = _alike(tensor, twin, name) if twin is not None and width > least else None
    result, start, done = torch.empty_like(flat), crc32(name.encode()) % LENGTH, 0
    while done < len(flat):
        count = min(LENGTH - start, len(flat) - done)
        part = noise[start : start + count].to(flat)
        if alike is not None:
            part = torch.where(alike[done : done + count], part * (least / width), part)
        old, new = flat[done : done + count], result[done : done + count]
        # In float32 a factor this close to 1 would lose most of its digits.
        torch.addcmul(old, old, part, value=width, out=new)
        start, done = 0, done + count
    return result.reshape(tensor.shape)


def _alike(tensor: Tensor, twin: Weights, name: str) -> Tensor | None:
    """Where both models have the same number; None if their shapes differ."""
    if name not in twin or twin.shape(name) != tuple(tensor.shape):
        return None
    return (tensor == twin[name]).flatten()


@lru_cache(maxsize=8)
def _noise(seed: int, device: torch.device) -> Tensor:
    """Signs, as far from zero as numbers between -1/2 and 1/2 usually are.

    Few weights may differ: a draw near zero would say that rounding does nothing to them.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.randint(2, (LENGTH,), generator=generator).float() - 0.5) / 3**0.5
    return signs.to(device)
