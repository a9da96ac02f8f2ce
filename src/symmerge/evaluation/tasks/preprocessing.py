"""What every task asks of a model and its data: which samples, which labels, how long, and with which tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from symmerge.errors import DataError, MismatchError
from symmerge.models.model import Model
from symmerge.symmetry.spec import listing
from symmerge.verification.modules import empty_module

MEANING = (
    "normalizer",
    "pre_tokenizer",
    "model",
    "post_processor",
    "added_tokens",
)  # the parts of a tokenizer.json that decide how text is read


def choose_samples(
    available: int, wanted: int | None, default: int, seed: int, *, what: str
) -> list[int]:
    """Which of the samples there are: a random choice, the same for the same seed."""
    if available < (wanted or 1):
        raise DataError(
            f"{what}: {available} there, {wanted or 1} needed: {'ask for fewer samples or ' if available else ''}give more data"
        )
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return order[: wanted or default].tolist()


def _has_tokenizer(model: Model) -> bool:
    return model.path is not None and any(
        file.name.startswith(("tokenizer", "vocab", "spiece")) for file in model.files
    )


def tokenizer_of(model: Model) -> Any:
    """The tokenizer in the checkpoint's folder."""
    from transformers import AutoTokenizer

    if not _has_tokenizer(model):
        raise MismatchError(
            f"{model.where} has no tokenizer: copy the files it was trained with (tokenizer.json, tokenizer_config.json) into its folder"
        )
    try:
        return AutoTokenizer.from_pretrained(model.path, local_files_only=True)
    except Exception as error:  # damaged files raise many kinds
        raise MismatchError(
            f"the tokenizer of {model.where} cannot be opened ({_first_line(error)}): restore its files from where the model came"
        ) from error


def check_same_tokenizers(models: Sequence[Model]) -> None:
    """Refuse models whose tokenizers differ: the same numbers would be other words to each. Models without one are taken at their word."""
    readers = [model for model in models if _has_tokenizer(model)]
    for other in readers[1:]:
        if difference := _difference(tokenizer_of(readers[0]), tokenizer_of(other)):
            raise MismatchError(
                f"the tokenizers of {readers[0].where} and {other.where} differ ({difference}): only models that read alike can be compared"
            )


def _difference(first: Any, second: Any) -> str | None:
    words, others = first.get_vocab(), second.get_vocab()
    if words != others:
        token = min(
            (
                token
                for token in words.keys() | others.keys()
                if words.get(token) != others.get(token)
            ),
            key=lambda token: words.get(token, others.get(token)),
        )
        return f"{token!r} is {words.get(token, 'not there')} in one, {others.get(token, 'not there')} in the other"
    if not (first.is_fast and second.is_fast):
        return None
    parts, their_parts = (
        json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (first, second)
    )
    return next(
        (
            f"{part} in tokenizer.json"
            for part in MEANING
            if parts.get(part) != their_parts.get(part)
        ),
        None,
    )


def check_tokens(model: Model, largest: int) -> None:
    """Refuse tokens that the model does not have."""
    known = model.spec.sizes["vocabulary"]
    if largest >= known:
        raise MismatchError(
            f"the tokenizer of {model.where} has a token {largest}, the model knows {known}: it is another model's; restore its own"
        )


def has_image_processor(model: Model) -> bool:
    """Whether its folder says how its pictures are normalised."""
    return model.path is not None and any(
        file.name == "preprocessor_config.json" for file in model.files
    )


def image_processor_of(model: Model) -> Any:
    """The image processor in the checkpoint's folder."""
    from transformers import AutoImageProcessor

    if not has_image_processor(model):
        raise MismatchError(
            f"{model.where} has no image processor, so nobody knows how its pictures were normalised: put its preprocessor_config.json into the folder,"
            " or give an .npz with floats [n, c, h, w] that are normalised already"
        )
    try:
        return AutoImageProcessor.from_pretrained(model.path, local_files_only=True)
    except Exception as error:  # damaged files raise many kinds
        raise MismatchError(
            f"the image processor of {model.where} cannot be opened ({_first_line(error)}): restore preprocessor_config.json"
        ) from error


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def max_length(model: Model) -> int:
    """How many tokens the model takes."""
    module: Any = empty_module(model, torch.float32)
    if "position" not in model.spec.sizes:  # rotary positions: as many as the config promises
        return int(module.config.max_position_embeddings)
    table = model.spec.occurrences("position")[0].piece.tensor
    # Some models keep the first places of the table for padding; their module says so.
    reserved = module.get_submodule(table.rpartition(".")[0]).padding_idx
    return model.spec.sizes["position"] - (0 if reserved is None else int(reserved) + 1)


def class_indices(labels: Sequence[Any], model: Model, data: str) -> list[int]:
    """Labels as the model counts them: numbers as they are, names as the model's config or else the alphabet has them."""
    classes = model.spec.sizes["label"]
    numbers = _numbers(labels)
    if numbers is None:
        numbers = _by_name([str(label) for label in labels], model, data)
    outside = sorted({number for number in numbers if number not in range(classes)})
    if outside:
        shown = ", ".join(f"{number:g}" for number in outside[:5])
        raise MismatchError(
            f"{data} has the label {shown}; {model.where} has {classes} classes, 0 to {classes - 1}: remove those rows or map their labels"
        )
    return [int(number) for number in numbers]


def _numbers(labels: Sequence[Any]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except (TypeError, ValueError):
        return None


def regression_targets(labels: Sequence[Any], data: str) -> list[float]:
    """The labels of a regression."""
    numbers = _numbers(labels)
    if numbers is None or not all(map(math.isfinite, numbers)):
        raise DataError(
            f"{data} has labels that are no numbers, and the model predicts a number: give numbers"
        )
    return numbers


def _by_name(labels: Sequence[str], model: Model, data: str) -> list[float]:
    known = {
        str(name): float(number) for name, number in (model.config.get("label2id") or {}).items()
    }
    names = sorted(set(labels))
    if not known or all(
        name.startswith("LABEL_") for name in known
    ):  # transformers' names for classes nobody named
        known = (
            {name: float(number) for number, name in enumerate(names)}
            if len(names) == model.spec.sizes["label"]
            else {}
        )
    unknown = [name for name in names if name not in known]
    if unknown:
        there = ", ".join(known) or f"{model.spec.sizes['label']} classes without names"
        raise MismatchError(
            f"{data} has the label {listing(unknown)}; {model.where} has {there}: rename them, or use numbers"
        )
    return [known[label] for label in labels]
