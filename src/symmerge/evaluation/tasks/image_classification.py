"""Image classification: labelled images, or synthetic ones without labels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from symmerge.errors import MismatchError
from symmerge.evaluation.data.dead_leaves import as_pixels, draw_dead_leaves
from symmerge.evaluation.data.images import LabelledImages, check_file, decode_image, read_images
from symmerge.evaluation.tasks.base import IGNORED, Batch, LazyBatches, Task, batched
from symmerge.evaluation.tasks.labels import class_indices
from symmerge.evaluation.tasks.preprocessing import (
    has_image_processor,
    image_processor_of,
    process_image,
)
from symmerge.evaluation.tasks.readouts import ImageReadout, UnlabelledReadout
from symmerge.evaluation.tasks.sampling import Sampling
from symmerge.models.model import Model
from symmerge.verification.inputs import image_shape, random_texts

BATCH_ROWS, SAMPLES = 64, 1000
TEXTS = 64

Shape = tuple[int, int, int]  # channels, height, width
Sample = tuple[int, int]  # number of the image, label


def image_task(models: Sequence[Model], data: str, sampling: Sampling) -> Task:
    """Classify images. Synthetic images have no labels."""
    model = models[0]
    if model.spec.task == "image-text":
        return _task_of_pairs(model, data, sampling)
    if data == "self":
        return _synthetic_task(model, sampling.limit(SAMPLES), sampling.seed)
    images = read_images(data)
    labels = class_indices(images.labels, model, data)
    indices = sampling.choose(len(labels), SAMPLES, what=f"{data}, images")
    if isinstance(images.items, list):  # image files
        for number in indices:
            check_file(images.items[number])
    if images.normalized:
        _check_shape(model, np.shape(images.items)[1:], data)
        collate = partial(_collate_normalized, images)
    else:
        collate = partial(_collate, images, image_processor_of(model), model)
    samples = [(number, labels[number]) for number in indices]
    batches = batched(samples, BATCH_ROWS, key=partial(_identity, images), collate=collate)
    return Task("image", data, len(indices), sampling.seed, ImageReadout(), batches, {})


def _synthetic_task(model: Model, count: int, seed: int) -> Task:
    """Dead leaves of the model's image size, always drawn on the CPU.

    They are normalized by the model's image processor; without one they have mean 0 and standard
    deviation 1.1, close to what most models are trained on.
    """
    processor = image_processor_of(model) if has_image_processor(model) else None
    collate = partial(_collate_synthetic, model, image_shape(model), processor, seed)
    samples = [(number, IGNORED) for number in range(count)]
    batches = batched(samples, BATCH_ROWS, key=lambda sample: sample[0], collate=collate)
    settings = {"pictures": "dead leaves"}
    return Task("image", "self", count, seed, UnlabelledReadout(), batches, settings)


def _task_of_pairs(model: Model, data: str, sampling: Sampling) -> Task:
    """Score synthetic images for texts of random tokens, the same texts in every batch."""
    if data != "self":
        raise MismatchError(
            f"{model.where} scores images for texts, and {data} has no texts: leave the data out,"
            " or give a task of your own (a symmerge.evaluation.tasks.Task whose batches have both)"
        )
    images = _synthetic_task(model, sampling.limit(SAMPLES), sampling.seed)
    assert isinstance(images.batches, LazyBatches)
    texts = random_texts(model, TEXTS, sampling.seed)
    batches = replace(images.batches, collate=partial(_with_texts, images.batches.collate, texts))
    settings = {**images.settings, "texts": f"{TEXTS} of random tokens"}
    return replace(images, batches=batches, settings=settings)


def _with_texts(
    collate: Callable[[Sequence[Sample]], Batch], texts: torch.Tensor, samples: Sequence[Sample]
) -> Batch:
    return {**collate(samples), "input_ids": texts}


def _collate_synthetic(
    model: Model, shape: Shape, processor: Any, seed: int, samples: Sequence[Sample]
) -> Batch:
    images = draw_dead_leaves([number for number, _ in samples], shape, seed)
    if processor is None:
        return _batch(torch.from_numpy(images), samples)
    return _batch(_normalize(processor, model, as_pixels(images)), samples)


def _collate_normalized(images: LabelledImages, samples: Sequence[Sample]) -> Batch:
    values = np.stack([images.items[number] for number, _ in samples]).astype(np.float32)
    return _batch(torch.from_numpy(values), samples)


def _collate(
    images: LabelledImages, processor: Any, model: Model, samples: Sequence[Sample]
) -> Batch:
    channels = model.spec.sizes["channel"]
    decoded = (decode_image(images.items[number], channels) for number, _ in samples)
    return _batch(_normalize(processor, model, decoded), samples)


def _batch(images: torch.Tensor, samples: Sequence[Sample]) -> Batch:
    return {"pixel_values": images, "labels": torch.tensor([label for _, label in samples])}


def _identity(images: LabelledImages, sample: Sample) -> object:
    """Sort key of an image: arrays by content, files by name."""
    number, _ = sample
    if isinstance(images.items, np.ndarray):
        return hashlib.sha256(images.items[number].tobytes()).digest()
    return number


def _normalize(processor: Any, model: Model, images: Iterable[np.ndarray]) -> torch.Tensor:
    """Pixel values for the model, from uint8 images with channels first."""
    values = []
    for image in images:
        values.append(process_image(processor, model, image))
        shape = tuple(values[-1].shape[1:])
        _check_shape(model, shape, f"the image processor of {model.where}")
    return torch.cat(values)


def _check_shape(model: Model, shape: tuple[int, ...], what: str) -> None:
    needed = image_shape(model)
    if shape != needed:
        raise MismatchError(
            f"{what} gives images of {list(shape)}; {model.where} takes {list(needed)}"
            " (channels, height, width): give those"
        )
