"""Pictures without data: dead leaves, discs that lie on one another as fallen leaves do.

Image classifiers write nothing, but what they were trained on is a photograph of something, and all such pictures share statistics that can be drawn.
Things hide one another, so that there are edges, corners and areas of one colour; and things are seen from any distance, so that no size is special:
the number of discs falls with a power of their radius, which gives the spectrum of natural images, too. The spectrum alone (noise of that spectrum)
teaches learned matching nothing on CIFAR-10; occlusion is what counts (docs/log.md, "Images without data").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8

LEAVES = 60  # enough to cover nearly all of a picture
SMALLEST, LARGEST = (
    0.06,
    0.49,
)  # radius of a disc, as a share of the picture's shorter side: from details to background
POWER = 0.7  # r = SMALLEST / u ** POWER for an even u: there are about r ** -2.4 discs of a radius
GREY, TINT = (
    1.0,
    0.5,
)  # spread of what all channels share, and of what each has alone: channels go together as in photographs
GRAIN = 0.1  # noise of a camera
BRIGHTNESS, SPREAD = (
    0.45,
    0.23,
)  # so that pixels from 0 to 1 are as bright and as different as those of a photograph
AT_ONCE = 1 << 16  # pixels that are painted at once: what a core keeps close by


def draw_dead_leaves(
    numbers: Sequence[int], shape: tuple[int, int, int], seed: int
) -> Float[np.ndarray, "n channel height width"]:
    """The pictures with these numbers, of mean 0 and spread 1.1: the same for the same seed, whichever are drawn with them.

    >>> dead_leaves([0, 1], (3, 32, 32), seed=0).shape
    (2, 3, 32, 32)
    """
    at_once = max(1, AT_ONCE // (shape[1] * shape[2]))
    return np.concatenate(
        [
            _painted(numbers[at : at + at_once], shape, seed)
            for at in range(0, len(numbers), at_once)
        ]
    )


def as_pixels(
    pictures: Float[np.ndarray, "n channel height width"],
) -> UInt8[np.ndarray, "n channel height width"]:
    """As a camera would have stored them: for models whose image processor says how they normalise."""
    return np.rint(255 * (BRIGHTNESS + SPREAD * pictures).clip(0, 1)).astype(np.uint8)


def _painted(numbers: Sequence[int], shape: tuple[int, int, int], seed: int) -> np.ndarray:
    channels, height, width = shape
    streams = [
        np.random.default_rng((seed, number)) for number in numbers
    ]  # one for each: a picture does not depend on its neighbours
    places = np.stack([stream.random((3, LEAVES), np.float32) for stream in streams])
    colours = np.stack(
        [stream.standard_normal((1 + channels, LEAVES + 1), np.float32) for stream in streams]
    )  # the first is the ground, and grey
    colours = GREY * colours[:, :1] + TINT * colours[:, 1:]
    colours[:, :, 0] = 0
    lowest = (SMALLEST / LARGEST) ** (1 / POWER)
    radius = min(height, width) * SMALLEST / (lowest + (1 - lowest) * places[:, 0]) ** POWER
    down = (np.arange(height, dtype=np.float32) - height * places[:, 1, :, None]) ** 2
    across = (np.arange(width, dtype=np.float32) - width * places[:, 2, :, None]) ** 2
    within = radius**2
    top = np.zeros((len(numbers), height, width), np.int8)
    for leaf in range(LEAVES):  # which leaf is seen at a pixel: the last one that fell there
        reach = (
            within[:, leaf, None] - down[:, leaf]
        )  # so that a pixel costs one comparison and no square root
        np.copyto(top, np.int8(leaf + 1), where=across[:, leaf, None, :] < reach[:, :, None])
    seen = np.take_along_axis(
        colours, top.reshape(len(numbers), 1, -1).astype(np.int64), 2
    ).reshape(len(numbers), *shape)
    return seen + GRAIN * np.stack(
        [stream.standard_normal(shape, np.float32) for stream in streams]
    )
