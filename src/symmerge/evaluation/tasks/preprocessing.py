"""Tokenizers and image processors of checkpoints, and checks that they fit the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from symmerge.checkpoints.pretrained import from_local
from symmerge.errors import MismatchError
from symmerge.models.model import Model
from symmerge.verification.modules import empty_module

# The sections of a tokenizer.json that decide how text is tokenized
SECTIONS = ("normalizer", "pre_tokenizer", "model", "post_processor", "added_tokens")


def _has_tokenizer(model: Model) -> bool:
    return model.path is not None and any(
        file.name.startswith(("tokenizer", "vocab", "spiece")) for file in model.files
    )


def tokenizer_of(model: Model) -> Any:
    """The tokenizer in the checkpoint's folder."""
    from transformers import AutoTokenizer

    if not _has_tokenizer(model):
        raise MismatchError(
            f"{model.where} has no tokenizer: copy the files it was trained with"
            " (tokenizer.json, tokenizer_config.json) into its folder"
        )
    try:
        return from_local(AutoTokenizer, model.path)
    except Exception as error:  # damaged files raise many kinds
        raise MismatchError(
            f"the tokenizer of {model.where} cannot be opened ({_one_line(error)}):"
            " restore its files from the model's source"
        ) from error


def check_same_tokenizers(models: Sequence[Model]) -> None:
    """Refuse models whose tokenizers differ. Models without one are not checked."""
    with_tokenizer = [model for model in models if _has_tokenizer(model)]
    for other in with_tokenizer[1:]:
        first = with_tokenizer[0]
        if difference := _difference(tokenizer_of(first), tokenizer_of(other)):
            raise MismatchError(
                f"the tokenizers of {first.where} and {other.where} differ ({difference}):"
                " only models with the same tokenizer can be compared"
            )


def _difference(first: Any, second: Any) -> str | None:
    ids, others = first.get_vocab(), second.get_vocab()
    different = [
        token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token)
    ]
    if different:
        token = min(different, key=lambda token: ids.get(token, others.get(token)))
        a, b = (vocabulary.get(token, "absent") for vocabulary in (ids, others))
        return f"{token!r} is {a} in one, {b} in the other"
    if not (first.is_fast and second.is_fast):
        return None
    a, b = (json.loads(one.backend_tokenizer.to_str()) for one in (first, second))
    sections = [section for section in SECTIONS if a.get(section) != b.get(section)]
    return f"{sections[0]} in tokenizer.json" if sections else None


def check_tokens(model: Model, largest: int) -> None:
    """Refuse token ids outside the model's vocabulary."""
    vocabulary = model.spec.sizes["vocabulary"]
    if largest >= vocabulary:
        raise MismatchError(
            f"the tokenizer of {model.where} has a token {largest}, the model knows {vocabulary}:"
            " it is another model's; restore its own"
        )


def has_image_processor(model: Model) -> bool:
    """Whether the checkpoint's folder has an image processor."""
    return model.path is not None and any(
        file.name == "preprocessor_config.json" for file in model.files
    )


def image_processor_of(model: Model) -> Any:
    """The image processor in the checkpoint's folder."""
    from transformers import AutoImageProcessor

    if not has_image_processor(model):
        raise MismatchError(
            f"{model.where} has no image processor, so the normalization of its images is unknown:"
            " put its preprocessor_config.json into the folder,"
            " or give an .npz with floats [n, c, h, w] that are normalized already"
        )
    try:
        return from_local(AutoImageProcessor, model.path)
    except Exception as error:  # damaged files raise many kinds
        raise MismatchError(
            f"the image processor of {model.where} cannot be opened ({_one_line(error)}):"
            " restore preprocessor_config.json"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def max_length(model: Model) -> int:
    """The largest number of tokens the model accepts."""
    module: Any = empty_module(model, torch.float32)
    if "position" not in model.spec.sizes:  # rotary positions: the config's limit
        return int(module.config.max_position_embeddings)
    table = model.spec.occurrences("position")[0].piece.tensor
    # Some models reserve the first rows of the table for padding; their module says so.
    reserved = module.get_submodule(table.rpartition(".")[0]).padding_idx
    return model.spec.sizes["position"] - (0 if reserved is None else int(reserved) + 1)
