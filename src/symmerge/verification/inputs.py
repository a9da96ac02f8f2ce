"""Random example inputs: tokens that avoid padding, or pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from symmerge.models.model import Model

TOKENS, IMAGES = (2, 48), 2


def example_inputs(model: Model, seed: int) -> dict[str, Tensor]:
    """The same random inputs for the same seed: tokens, or pixels."""
    generator = torch.Generator().manual_seed(seed)
    sizes = model.spec.sizes
    if "channel" in sizes:
        side = model.config.get("image_size", 224)
        height, width = (side, side) if isinstance(side, int) else side
        return {
            "pixel_values": torch.randn(
                IMAGES, sizes["channel"], height, width, generator=generator
            )
        }
    rows, length = TOKENS
    length = min(
        length, sizes.get("position", length + 2) - 2
    )  # RoBERTa's first two positions are reserved
    tokens = torch.randint(0, sizes["vocabulary"], (rows, length), generator=generator)
    padding = model.config.get("pad_token_id")
    return {
        "input_ids": torch.where(tokens == padding, (tokens + 1) % sizes["vocabulary"], tokens)
        if padding is not None
        else tokens
    }
