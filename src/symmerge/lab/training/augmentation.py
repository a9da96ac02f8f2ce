"""Random crops, flips and colour jitter on the device, per image.

torchvision's definitions (brightness, contrast, saturation, hue in this order), but not its code:
its transforms (v2) draw one crop and one jitter for the whole batch, on the host, so they neither
vary per image nor fit into a CUDA graph. Nor can it be imported with a CPU build of torch.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

PADDING, JITTER, HUE = 4, 0.4, 0.1
RANDOM_NUMBERS = 7  # per image: two for the crop, one for the flip, four for colours


def augment(
    images: Float[Tensor, "n side side 3"], noise: Float[Tensor, "n numbers"]
) -> Float[Tensor, "n side side 3"]:
    """Augment images in [0, 1]; `noise` has each image's uniform random numbers."""
    factors = 1 + JITTER * (2 * noise[:, 3:6, None, None, None] - 1)
    brightness, contrast, saturation = factors.unbind(1)
    bright = (_crop(images, noise) * brightness).clamp(0, 1)
    grey = _grey(bright).mean((1, 2, 3), keepdim=True)
    contrasted = (contrast * bright + (1 - contrast) * grey).clamp(0, 1)
    saturated = (saturation * contrasted + (1 - saturation) * _grey(contrasted)).clamp(0, 1)
    return _shift_hue(saturated, HUE * (2 * noise[:, 6, None, None] - 1))


def _crop(images: Tensor, noise: Tensor) -> Tensor:
    """Pad with zeros, crop a random square of the old size, flip half of the images."""
    count, side = images.shape[:2]
    pixels = torch.arange(side, device=images.device)
    top, left = (noise[:, :2] * (2 * PADDING + 1)).long().clamp(max=2 * PADDING).split(1, 1)
    rows = top + pixels
    columns = left + torch.where(noise[:, 2:3] < 0.5, side - 1 - pixels, pixels)
    padded = functional.pad(images, (0, 0, *(PADDING,) * 4))
    image = torch.arange(count, device=images.device)
    return padded[image[:, None, None], rows[:, :, None], columns[:, None, :]]


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.split(1, -1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def _shift_hue(images: Tensor, hue: Tensor) -> Tensor:
    """Shift hues by a fraction of the colour circle."""
    red, green, blue = images.unbind(-1)
    top = torch.maximum(torch.maximum(red, green), blue)
    span = top - torch.minimum(torch.minimum(red, green), blue)
    # A Python number in torch.where would be copied to the device, which a graph forbids.
    safe = span + (span == 0)
    other = torch.where(top == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sixths = torch.where(top == red, (green - blue) / safe, other) + 6 * hue
    sectors = [(sixths + offset).remainder(6) for offset in (5, 3, 1)]
    channels = [top - span * torch.minimum(at, 4 - at).clamp(0, 1) for at in sectors]
    return torch.stack(channels, -1)
