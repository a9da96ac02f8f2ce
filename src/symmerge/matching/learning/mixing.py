"""Images mixed with one another: parents that are certain of every image they were trained on are
not certain of these, so that their answers say more than a label does.

Small ViTs of digits, 110 steps on their 300 training images: loss and accuracy of the midpoint
.342, .918 as they are, mixed .282, .925 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from symmerge.evaluation.tasks.base import Batch, LazyBatches

PIXELS = "pixel_values"
TIMES = 3  # each image, with others
LEAST = 0.5  # share of the image itself
Mixed = tuple[object, float]
"""A sample, and its own share; the rest is of the one before it in its batch."""


def mixed(batches: LazyBatches, size: int, seed: int) -> LazyBatches:
    """Batches of images that are mixed with others of their batch; several of each image."""
    generator, rows = torch.Generator().manual_seed(seed), list(batches.samples)
    ends = len(rows) - len(rows) % size or len(rows)  # full batches only, as without mixing
    chunks: list[tuple[Mixed, ...]] = []
    for _ in range(TIMES):
        order = torch.randperm(len(rows), generator=generator).tolist()
        shares = (LEAST + (1 - LEAST) * torch.rand(len(rows), generator=generator)).tolist()
        drawn = [(rows[number], share) for number, share in zip(order, shares, strict=True)]
        chunks += [tuple(drawn[start : start + size]) for start in range(0, ends, size)]
    return LazyBatches(tuple(chunks), partial(_collate, batches.collate))


def _collate(collate: Callable[[Sequence[Any]], Batch], chunk: Sequence[Mixed]) -> Batch:
    samples, shares = zip(*chunk, strict=True)
    batch, share = collate(samples), torch.tensor(shares)[:, None, None, None]
    images = batch[PIXELS]
    return {**batch, PIXELS: share * images + (1 - share) * images.roll(1, 0)}
