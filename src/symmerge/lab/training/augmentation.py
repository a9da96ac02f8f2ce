"""Pictures changed by chance, on the device they are on: cropped, flipped and jittered; torchvision's definitions, brightness first."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

PADDING, JITTER, HUE = 4, 0.4, 0.1
RANDOM_NUMBERS = 7  # random numbers that one picture takes


def augment(
    pictures: Float[Tensor, "n side side 3"], noise: Float[Tensor, "n chances"]
) -> Float[Tensor, "n side side 3"]:
    """Pictures from 0 to 1, each changed as its random numbers say."""
    count, side = pictures.shape[:2]
    near = torch.arange(side, device=pictures.device)
    top, left = (noise[:, :2] * (2 * PADDING + 1)).long().clamp(max=2 * PADDING).split(1, 1)
    rows, columns = top + near, left + torch.where(noise[:, 2:3] < 0.5, side - 1 - near, near)
    padded = functional.pad(pictures, (0, 0, *(PADDING,) * 4))
    cropped = padded[
        torch.arange(count, device=pictures.device)[:, None, None],
        rows[:, :, None],
        columns[:, None, :],
    ]
    brightness, contrast, saturation = (
        1 + JITTER * (2 * noise[:, 3:6, None, None, None] - 1)
    ).unbind(1)
    bright = (cropped * brightness).clamp(0, 1)
    contrasted = (
        contrast * bright + (1 - contrast) * _grey(bright).mean((1, 2, 3), keepdim=True)
    ).clamp(0, 1)
    saturated = (saturation * contrasted + (1 - saturation) * _grey(contrasted)).clamp(0, 1)
    return _turned(saturated, HUE * (2 * noise[:, 6, None, None] - 1))


def _grey(pictures: Tensor) -> Tensor:
    red, green, blue = pictures.split(1, -1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def _turned(pictures: Tensor, hue: Tensor) -> Tensor:
    """Pictures with their hue turned by a part of the circle."""
    red, green, blue = pictures.unbind(-1)
    most = torch.maximum(torch.maximum(red, green), blue)
    span = most - torch.minimum(torch.minimum(red, green), blue)
    safe = span + (
        span == 0
    )  # a number in torch.where would be copied to the device, which a graph forbids
    sixths = (
        torch.where(
            most == red,
            (green - blue) / safe,
            torch.where(most == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
        )
        + 6 * hue
    )
    places = [(sixths + offset).remainder(6) for offset in (5, 3, 1)]
    return torch.stack(
        [most - span * torch.minimum(place, 4 - place).clamp(0, 1) for place in places], -1
    )
