"""Synthetic images: dead leaves, discs of random size and colour that occlude one another.

They share statistics with photographs. Occlusion gives edges, corners and areas of one colour;
radii follow a power law, which is scale-invariant and gives the spectrum of natural images.
Noise with that spectrum does not help learned matching on CIFAR-10: occlusion is what matters
(docs/log.md, "Images without data").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8

LEAVES = 60  # enough to cover nearly all of an image
SMALLEST, LARGEST = 0.06, 0.49  # radius of a disc, as a share of the image's shorter side
POWER = 0.7  # r = SMALLEST / u ** POWER for uniform u: the density of radii is about r ** -2.4
GREY, TINT = 1.0, 0.5  # std shared by all channels, and of each channel: as in photographs
GRAIN = 0.1  # camera noise
BRIGHTNESS, SPREAD = 0.45, 0.23  # mean and standard deviation of photographs, pixels from 0 to 1
PIXELS_AT_ONCE = 1 << 16  # fits into a core's cache

Shape = tuple[int, int, int]  # channels, height, width


def draw_dead_leaves(
    numbers: Sequence[int], shape: Shape, seed: int
) -> Float[np.ndarray, "n channel height width"]:
    """The images with these numbers, of mean 0 and standard deviation 1.1.

    Each depends only on its number and the seed.

    >>> draw_dead_leaves([0, 1], (3, 32, 32), seed=0).shape
    (2, 3, 32, 32)
    """
    size = max(1, PIXELS_AT_ONCE // (shape[1] * shape[2]))
    chunks = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return np.concatenate([_draw(chunk, shape, seed) for chunk in chunks])


def as_pixels(
    images: Float[np.ndarray, "n channel height width"],
) -> UInt8[np.ndarray, "n channel height width"]:
    """8-bit images as a camera stores them, for models that have an image processor."""
    return np.rint(255 * (BRIGHTNESS + SPREAD * images).clip(0, 1)).astype(np.uint8)


def _draw(numbers: Sequence[int], shape: Shape, seed: int) -> np.ndarray:
    channels, height, width = shape
    # One generator per image: an image does not depend on its neighbours.
    generators = [np.random.default_rng((seed, number)) for number in numbers]
    places = np.stack([one.random((3, LEAVES), np.float32) for one in generators])
    sizes = (1 + channels, LEAVES + 1)
    colours = np.stack([one.standard_normal(sizes, np.float32) for one in generators])
    # The first channel is shared by all others; the first leaf is the background.
    colours = GREY * colours[:, :1] + TINT * colours[:, 1:]
    colours[:, :, 0] = 0
    top = _topmost_leaf(places, height, width).reshape(len(numbers), 1, -1)
    visible = np.take_along_axis(colours, top.astype(np.int64), 2).reshape(len(numbers), *shape)
    grain = np.stack([one.standard_normal(shape, np.float32) for one in generators])
    return visible + GRAIN * grain


def _topmost_leaf(places: np.ndarray, height: int, width: int) -> np.ndarray:
    """For every pixel, the number of the topmost leaf; 0 is the background."""
    lowest = (SMALLEST / LARGEST) ** (1 / POWER)
    radius = min(height, width) * SMALLEST / (lowest + (1 - lowest) * places[:, 0]) ** POWER
    down = (np.arange(height, dtype=np.float32) - height * places[:, 1, :, None]) ** 2
    across = (np.arange(width, dtype=np.float32) - width * places[:, 2, :, None]) ** 2
    square = radius**2
    top = np.zeros((len(places), height, width), np.int8)
    for leaf in range(LEAVES):
        reach = square[:, leaf, None] - down[:, leaf]  # one comparison per pixel, no square root
        np.copyto(top, np.int8(leaf + 1), where=across[:, leaf, None, :] < reach[:, :, None])
    return top
