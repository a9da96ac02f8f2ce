"""Classification and regression of texts, or of pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.data.text import TextRows, read_rows
from symmerge.evaluation.tasks.base import Batch, Readout, Task, batched
from symmerge.evaluation.tasks.labels import class_indices, regression_targets
from symmerge.evaluation.tasks.preprocessing import check_tokens, encode, max_length, tokenizer_of
from symmerge.evaluation.tasks.readouts import ClassReadout, ValueReadout
from symmerge.evaluation.tasks.sampling import Sampling
from symmerge.models.model import Model

BATCH_ROWS, SAMPLES = 32, 1000

Encoding = dict[str, list[int]]  # a tokenizer's output: token ids, attention mask, ...
Sample = tuple[Encoding, int | float]  # with its label


def text_task(models: Sequence[Model], data: str, sampling: Sampling) -> Task:
    """Classify texts or pairs of texts, or predict a value for them."""
    model, rows = models[0], read_rows(data)
    assert rows.labels is not None
    readout, labels = _readout_and_labels(model, rows.labels, data)
    indices = sampling.choose(len(labels), SAMPLES, what=f"{data}, rows")
    tokenizer = tokenizer_of(model)
    encodings = _encode(model, tokenizer, rows, indices, data)
    samples = list(zip(encodings, (labels[number] for number in indices), strict=True))
    own = tokenizer.pad_token_id or 0
    # Classes that read the last token, or count positions, look for the padding of the config.
    padding = model.config.get("pad_token_id")
    padding = own if padding is None else padding
    check_tokens(model, own, padding)
    collate = partial(_pad, padding)
    batches = batched(samples, BATCH_ROWS, key=_length_first, collate=collate)
    return Task("text", data, len(samples), sampling.seed, readout, batches, {})


def _readout_and_labels(
    model: Model, labels: Sequence[object], data: str
) -> tuple[Readout, list[int] | list[float]]:
    kind, classes = model.config.get("problem_type"), model.spec.sizes["label"]
    if kind == "multi_label_classification" or (kind == "regression" and classes > 1):
        raise MismatchError(
            f"{model.where} predicts several values at once (problem_type {kind}):"
            " the text task is for one class or one value"
        )
    if classes == 1:
        return ValueReadout(), regression_targets(labels, data)
    return ClassReadout(classes), class_indices(labels, model, data)


def _encode(
    model: Model, tokenizer: Any, rows: TextRows, indices: Sequence[int], data: str
) -> list[Encoding]:
    """Tokenize the chosen rows; rows that are too long for the model are an error."""
    limit = max_length(model)
    encodings = [encode(model, tokenizer, *rows.texts[number]) for number in indices]
    for number, encoding in zip(indices, encodings, strict=True):
        tokens = encoding["input_ids"]
        if len(tokens) > limit:
            raise DataError(
                f"{data}, row {number + 1} has {len(tokens)} tokens;"
                f" {model.where} takes {limit}: shorten or remove it"
            )
    names, types = tokenizer.model_input_names, model.spec.sizes.get("type", 0)
    known = [name for name in names if name != "token_type_ids" or types > 1]
    return [{name: list(one[name]) for name in known if name in one} for one in encodings]


def _length_first(sample: Sample) -> object:
    tokens, label = sample[0]["input_ids"], sample[1]
    return len(tokens), tokens, label


def _pad(padding: int, samples: Sequence[Sample]) -> Batch:
    """Pad texts to one length; the attention mask hides the padding."""
    length = max(len(encoding["input_ids"]) for encoding, _ in samples)

    def column(name: str) -> torch.Tensor:
        fill = [padding if name == "input_ids" else 0]
        rows = [encoding[name] for encoding, _ in samples]
        return torch.tensor([row + fill * (length - len(row)) for row in rows])

    batch = {name: column(name) for name in samples[0][0]}
    return {**batch, "labels": torch.tensor([label for _, label in samples])}
