"""Tokenizers and image processors of checkpoints, and checks that they fit the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from symmerge.checkpoints.limits import LARGEST_JSON, LARGEST_TOKENIZER
from symmerge.checkpoints.pretrained import from_local
from symmerge.errors import MismatchError, SymmergeError
from symmerge.evaluation.data.self_generated import TRAINED
from symmerge.models.model import Model
from symmerge.verification.inputs import image_shape
from symmerge.verification.modules import empty_module

TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "special_tokens", "added_tokens")
RESTORE_TOKENIZER = "restore its files from the model's source"
RESTORE_PROCESSOR = "restore preprocessor_config.json"
UNLIMITED = 1 << 20  # tokens, where nothing says how many a model was trained with
LARGEST_ENLARGEMENT = 4  # of a processor's sides over the model's; 256 for 224 is usual
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
    with _damages(f"the tokenizer of {model.where} cannot be opened", RESTORE_TOKENIZER):
        _check_files(model, LARGEST_TOKENIZER, TOKENIZER_FILES)
        tokenizer = from_local(AutoTokenizer, model.path)
        names = tokenizer.model_input_names
        named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not named or "input_ids" not in names:
            raise ValueError("its model_input_names do not name input_ids")
        for name in ("mask_token_id", "pad_token_id"):  # damaged ones fail when they are asked for
            getattr(tokenizer, name)
        return tokenizer


def encode(model: Model, tokenizer: Any, *texts: str, **options: Any) -> Any:
    """Tokenize; a damaged tokenizer may fail only here. Token ids must be the model's."""
    with _damages(f"the tokenizer of {model.where} fails", RESTORE_TOKENIZER):
        encoded = tokenizer(*texts, verbose=False, **options)
        tokens = encoded["input_ids"]
        check_tokens(model, min(tokens, default=0), max(tokens, default=0))
        return encoded


@dataclass(frozen=True)
class LongText:
    """Tokens of a text, and where each ends, in characters, if the tokenizer knows."""

    tokens: np.ndarray
    ends: np.ndarray | None


def encode_long(model: Model, tokenizer: Any, text: str) -> LongText:
    """Tokenize a text without special tokens; the last ones are remembered.

    All methods and all pairs are measured on one text: 0.4 s for Python's documentation.
    """
    with _damages(f"the tokenizer of {model.where} fails", RESTORE_TOKENIZER):
        encoded = _encoded(by_content(tokenizer), text)
    tokens = encoded.tokens
    check_tokens(model, int(tokens.min(initial=0)), int(tokens.max(initial=0)))
    return encoded


@dataclass(frozen=True)
class TokenizerByContent:
    """A tokenizer that equals those with the same content, as a key of caches."""

    content: str
    tokenizer: Any = field(compare=False)


def by_content(tokenizer: Any) -> TokenizerByContent:
    """The tokenizer as a key; one that is written in Python equals only itself."""
    if not tokenizer.is_fast:
        return TokenizerByContent(f"{id(tokenizer)}", tokenizer)
    options = tokenizer.split_special_tokens  # set in Rust when text is tokenized, not before
    return TokenizerByContent(f"{tokenizer.backend_tokenizer.to_str()} {options}", tokenizer)


@lru_cache(maxsize=4)
def _encoded(key: TokenizerByContent, text: str) -> LongText:
    tokenizer = key.tokenizer
    options = {"add_special_tokens": False, "return_offsets_mapping": tokenizer.is_fast}
    encoded = tokenizer(text, verbose=False, **options)
    tokens = np.asarray(encoded["input_ids"], dtype=np.int64)
    if not tokenizer.is_fast:
        return LongText(tokens, None)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    return LongText(tokens, offsets[:, 1].copy())


def _check_files(model: Model, limit: int, prefixes: tuple[str, ...]) -> None:
    for file in model.files:
        if file.name.startswith(prefixes) and file.stat().st_size > limit:
            raise ValueError(f"{file.name} has more than {limit:,} bytes")


@contextmanager
def _damages(what: str, remedy: str) -> Iterator[None]:
    """One line for whatever a library raises: damaged files raise many kinds."""
    try:
        yield
    except (SymmergeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers' Rust code is no Exception
        raise MismatchError(f"{what} ({_one_line(error)}): {remedy}") from error


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


def check_tokens(model: Model, *tokens: int) -> None:
    """Refuse token ids outside the model's vocabulary."""
    vocabulary = model.spec.sizes["vocabulary"]
    for token in tokens:
        if token not in range(vocabulary):
            raise MismatchError(
                f"the tokenizer of {model.where} has a token {token}, the model knows {vocabulary}:"
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
    what = f"the image processor of {model.where} cannot be opened"
    with _damages(what, RESTORE_PROCESSOR):
        _check_files(model, LARGEST_JSON, ("preprocessor_config",))
        processor = from_local(AutoImageProcessor, model.path)
        _check_sizes(processor, model)
        return processor


def _check_sizes(processor: Any, model: Model) -> None:
    """Refuse to enlarge images far beyond what the model takes: memory grows with the square."""
    largest = LARGEST_ENLARGEMENT * max(image_shape(model)[1:])
    for name in ("size", "crop_size", "pad_size"):
        size = getattr(processor, name, None)
        for key, value in dict(size or {}).items():
            if value is not None and value not in range(1, largest + 1):
                raise ValueError(f"{name} has {key} {value}, it must be from 1 to {largest}")


def process_image(processor: Any, model: Model, image: np.ndarray) -> torch.Tensor:
    """Pixel values for the model, from a uint8 image with channels first.

    One at a time: what a batch of large pictures takes together does not fit.
    """
    what = f"the image processor of {model.where} fails"
    with _damages(what, RESTORE_PROCESSOR), np.errstate(all="ignore"):
        options = {"input_data_format": "channels_first", "return_tensors": "pt"}
        writable = np.array(image)  # else PyTorch warns
        values = processor([writable], **options)["pixel_values"].float()
        if not values.isfinite().all():
            raise ValueError("it gives pixels that are NaN or infinite")
        return values


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error or type(error).__name__}".split())[:160]


def max_length(model: Model) -> int:
    """The largest number of tokens the model accepts."""
    module: Any = empty_module(model, torch.float32)
    if "position" not in model.spec.sizes:  # rotary positions: the config's limit
        named = (getattr(module.config, field, None) for field in TRAINED)
        return next((most for most in named if isinstance(most, int)), UNLIMITED)
    table = model.spec.occurrences("position")[0].piece.tensor
    # Some models reserve rows up to that of the padding token; their module says which it is now.
    padding = module.get_submodule(table.rpartition(".")[0]).padding_idx
    reserved = model.spec.reserved_positions if padding is None else int(padding) + 1
    return model.spec.sizes["position"] - reserved
