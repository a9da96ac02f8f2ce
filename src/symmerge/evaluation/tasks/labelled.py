"""Classification of images and of text, and regression of text: samples with one label each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.data.dead_leaves import as_pixels, draw_dead_leaves
from symmerge.evaluation.data.images import LabelledImages, check_file, decode_image, read_images
from symmerge.evaluation.data.text import read_rows
from symmerge.evaluation.tasks.base import IGNORED, Batch, Readout, Task, batched
from symmerge.evaluation.tasks.preprocessing import (
    check_tokens,
    choose_samples,
    class_indices,
    has_image_processor,
    image_processor_of,
    max_length,
    regression_targets,
    tokenizer_of,
)
from symmerge.evaluation.tasks.readouts import (
    ClassReadout,
    ImageReadout,
    UnlabelledReadout,
    ValueReadout,
)
from symmerge.models.model import Model
from symmerge.verification.inputs import example_inputs

IMAGE_ROWS, TEXT_ROWS = 64, 32
SAMPLES = 1000

Encoded = tuple[dict[str, list[int]], int | float]  # tokens and what belongs to them, and the label


def image(
    models: Sequence[Model],
    data: str,
    *,
    samples: int | None,
    max_samples: int | None,
    seed: int,
    device: str = "cpu",
) -> Task:
    """Which class a picture belongs to; of pictures that are drawn (always on the CPU), nobody knows."""
    if data == "self":
        return _own_pictures(models[0], samples or max_samples or SAMPLES, seed)
    model, found = models[0], read_images(data)
    labels = class_indices(found.labels, model, data)
    picked = choose_samples(
        len(labels), samples, max_samples or SAMPLES, seed, what=f"{data}, pictures"
    )
    if isinstance(found.items, list):  # of files
        for at in picked:
            check_file(found.items[at])
    if found.ready:
        _fits(model, np.shape(found.items)[1:], data)
    collate = (
        partial(_ready, found)
        if found.ready
        else partial(_processed, found, image_processor_of(model), model)
    )
    batches = batched(
        [(at, labels[at]) for at in picked], IMAGE_ROWS, key=partial(_place, found), collate=collate
    )
    return Task("image", data, len(picked), seed, ImageReadout(), batches, {})


def _own_pictures(model: Model, count: int, seed: int) -> Task:
    """Dead leaves of the model's size, normalised as its image processor says; without one, to mean 0 and spread 1.1, about as most models are trained."""
    processor = image_processor_of(model) if has_image_processor(model) else None
    collate = partial(_drawn, model, _shape(model), processor, seed)
    batches = batched(
        [(number, IGNORED) for number in range(count)],
        IMAGE_ROWS,
        key=lambda sample: sample[0],
        collate=collate,
    )
    return Task(
        "image", "self", count, seed, UnlabelledReadout(), batches, {"pictures": "dead leaves"}
    )


def _drawn(
    model: Model,
    shape: tuple[int, int, int],
    processor: Any,
    seed: int,
    samples: Sequence[tuple[int, int]],
) -> Batch:
    pictures = draw_dead_leaves([number for number, _ in samples], shape, seed)
    images = (
        torch.from_numpy(pictures)
        if processor is None
        else _normalised(processor, model, list(as_pixels(pictures)))
    )
    return {"pixel_values": images, "labels": _labels(samples)}


def _place(found: LabelledImages, sample: tuple[int, int]) -> Any:
    """Arrays go by what they show, files by their name."""
    at, _ = sample
    return (
        hashlib.sha256(found.items[at].tobytes()).digest()
        if isinstance(found.items, np.ndarray)
        else at
    )


def _labels(samples: Sequence[tuple[Any, int]]) -> torch.Tensor:
    return torch.tensor([label for _, label in samples])


def _ready(found: LabelledImages, samples: Sequence[tuple[int, int]]) -> Batch:
    images = torch.from_numpy(np.stack([found.items[at] for at, _ in samples])).float()
    return {"pixel_values": images, "labels": _labels(samples)}


def _processed(
    found: LabelledImages, processor: Any, model: Model, samples: Sequence[tuple[int, int]]
) -> Batch:
    pictures = [decode_image(found.items[at], model.spec.sizes["channel"]) for at, _ in samples]
    return {"pixel_values": _normalised(processor, model, pictures), "labels": _labels(samples)}


def _normalised(processor: Any, model: Model, pictures: list[np.ndarray]) -> torch.Tensor:
    """Pictures of bytes, channels first, as the model takes them."""
    images = processor(pictures, input_data_format="channels_first", return_tensors="pt")[
        "pixel_values"
    ].float()
    _fits(model, tuple(images.shape[1:]), f"the image processor of {model.where}")
    return images


def _shape(model: Model) -> tuple[int, int, int]:
    """Channels, height and width of what a model takes."""
    channels, height, width = example_inputs(model, seed=0)["pixel_values"].shape[1:]
    return channels, height, width


def _fits(model: Model, shape: tuple[int, ...], what: str) -> None:
    wanted = _shape(model)
    if shape != wanted:
        raise MismatchError(
            f"{what} gives pictures of {list(shape)}; {model.where} takes {list(wanted)} (channels, height, width): give those"
        )


def text(
    models: Sequence[Model], data: str, *, samples: int | None, max_samples: int | None, seed: int
) -> Task:
    """Which class a text or a pair of texts belongs to, or which value it has."""
    model, rows = models[0], read_rows(data)
    assert rows.labels is not None
    readout, labels = _meaning(model, rows.labels, data)
    picked = choose_samples(
        len(labels), samples, max_samples or SAMPLES, seed, what=f"{data}, rows"
    )
    tokenizer, limit = tokenizer_of(model), max_length(model)
    encoded = [(tokenizer(*rows.texts[at], verbose=False), labels[at], at) for at in picked]
    for tokens, _, at in encoded:
        check_tokens(model, max(tokens["input_ids"], default=0))
        if len(tokens["input_ids"]) > limit:
            raise DataError(
                f"{data}, row {at + 1} has {len(tokens['input_ids'])} tokens; {model.where} takes {limit}: shorten or remove it"
            )
    known = [
        name
        for name in tokenizer.model_input_names
        if name != "token_type_ids" or model.spec.sizes.get("type", 0) > 1
    ]
    items = [
        ({name: list(tokens[name]) for name in known if name in tokens}, label)
        for tokens, label, _ in encoded
    ]
    batches = batched(
        items, TEXT_ROWS, key=_length_first, collate=partial(_padded, tokenizer.pad_token_id or 0)
    )
    return Task("text", data, len(items), seed, readout, batches, {})


def _meaning(
    model: Model, labels: Sequence[Any], data: str
) -> tuple[Readout, list[int] | list[float]]:
    kind, classes = model.config.get("problem_type"), model.spec.sizes["label"]
    if kind == "multi_label_classification" or (kind == "regression" and classes > 1):
        raise MismatchError(
            f"{model.where} answers with several values at once (problem_type {kind}): the text task is for one class or one value"
        )
    if classes == 1:
        return ValueReadout(), regression_targets(labels, data)
    return ClassReadout(classes), class_indices(labels, model, data)


def _length_first(sample: Encoded) -> Any:
    return len(sample[0]["input_ids"]), sample[0]["input_ids"], sample[1]


def _padded(padding: int, samples: Sequence[Encoded]) -> Batch:
    """Texts side by side, the shorter ones filled up; the attention mask hides what was filled."""
    length = max(len(tokens["input_ids"]) for tokens, _ in samples)
    fill = {"input_ids": padding}
    names = samples[0][0]
    batch = {
        name: torch.tensor(
            [
                tokens[name] + [fill.get(name, 0)] * (length - len(tokens[name]))
                for tokens, _ in samples
            ]
        )
        for name in names
    }
    return {**batch, "labels": torch.tensor([label for _, label in samples])}
