"""Random example inputs: tokens that avoid padding, or pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from symmerge.models.model import Model

TOKENS, IMAGES = (2, 48), 2


def example_inputs(model: Model, seed: int) -> dict[str, Tensor]:
    """Random tokens or pixels for a model, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = model.spec.sizes
    if "channel" in sizes:
        side = model.config.get("image_size", 224)
        height, width = (side, side) if isinstance(side, int) else side
        shape = (IMAGES, sizes["channel"], height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    rows, length = TOKENS
    # RoBERTa's first two positions are reserved.
    length = min(length, sizes.get("position", length + 2) - 2)
    tokens = torch.randint(0, sizes["vocabulary"], (rows, length), generator=generator)
    padding = model.config.get("pad_token_id")
    if padding is not None:
        tokens = torch.where(tokens == padding, (tokens + 1) % sizes["vocabulary"], tokens)
    return {"input_ids": tokens}


def describe_inputs(inputs: dict[str, Tensor]) -> str:
    """For example "2x48 random tokens"."""
    shape = "x".join(str(n) for n in next(iter(inputs.values())).shape)
    return f"{shape} random {'pixels' if 'pixel_values' in inputs else 'tokens'}"
