"""What a model in training sees: the samples of a recipe's data, and the tokenizer or image processor that goes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symmerge.checkpoints.files import write_json
from symmerge.errors import MismatchError
from symmerge.evaluation.data.embedded import digits
from symmerge.evaluation.data.text import read_rows
from symmerge.lab.training.cache import cached
from symmerge.lab.training.datasets import (
    CausalText,
    Dataset,
    FixedSamples,
    Images,
    LabelledTexts,
    MaskedText,
    map_tensors,
)
from symmerge.lab.training.files import (
    INSTALLED,
    data_folder,
    labelled_table,
    prepare_images,
    text_splits,
)
from symmerge.lab.training.pictures import SETS
from symmerge.lab.training.recipe import TrainingRecipe
from symmerge.lab.training.tokens import cached_tokens, tokenize, train_tokenizer

MEAN, STD = 0.5, 0.5
shared_tokenizer = lru_cache(maxsize=4)(train_tokenizer)  # every seed has the same
HELD_BACK = (
    10  # one in so many training samples is looked at instead of learned, where looks are had
)


@dataclass(frozen=True)
class Splits:
    """What is learned, what is looked at while learning and afterwards, and what is saved beside the weights."""

    train: Dataset
    valid: Dataset | None
    test: Dataset
    save: Callable[[Path], Any]


def load_splits(
    recipe: TrainingRecipe, data: Path | None = None, begin: Path | None = None
) -> Splits:
    """Everything for a recipe. A model to begin from brings its own tokenizer."""
    return LOADERS[recipe.task](recipe, data, begin)


def _images(recipe: TrainingRecipe, data: Path | None, _: Path | None) -> Splits:
    if recipe.data in INSTALLED:
        (train, test), mean, std = (_digits(part) for part in ("train", "test")), [MEAN], [STD]
    else:
        folder, (mean, std) = (
            data_folder(data, recipe.data),
            (list(SETS[recipe.data].mean), list(SETS[recipe.data].std)),
        )
        train, test = (
            _photographs(recipe.data, prepare_images(folder, recipe.data, part))
            for part in ("train", "test")
        )
    size = {"height": recipe.config["image_size"], "width": recipe.config["image_size"]}
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": size,
        "image_mean": mean,
        "image_std": std,
    }
    return Splits(
        *_divided(recipe, train),
        test,
        lambda folder: write_json(folder / "preprocessor_config.json", processor),
    )


def _digits(split: str) -> FixedSamples:
    """The digits as they are. Moved about by a pixel they are harder, and two seeds then learn features that no symmetry relates."""
    images, labels = digits(split)
    # In 256 steps, as the image processor sees them.
    shown = torch.from_numpy((np.rint(images * 255).astype(np.float32) / 255 - MEAN) / STD)[:, None]
    return FixedSamples({"pixel_values": shown}, torch.from_numpy(labels))


def _photographs(data: str, file: Path) -> Images:
    with np.load(file) as found:
        return Images(
            torch.from_numpy(found["images"]),
            torch.from_numpy(found["labels"]),
            SETS[data].mean,
            SETS[data].std,
        )


def _language(recipe: TrainingRecipe, data: Path | None, begin: Path | None) -> Splits:
    parts, masked = text_splits(recipe, data), recipe.task == "mlm"
    tokenizer = _tokenizer(recipe, parts["train"], data, begin)
    if len(tokenizer) > recipe.config["vocab_size"]:
        raise MismatchError(
            f"the tokenizer has {len(tokenizer)} tokens, {recipe.architecture} {recipe.config['vocab_size']}: change vocab_size"
        )
    place = None if recipe.data in INSTALLED else data_folder(data, recipe.data).prepared

    def lessons(part: str) -> CausalText | MaskedText:
        found = (
            tokenize(tokenizer, parts[part])
            if place is None
            else cached_tokens(tokenizer, parts[part], place, f"{recipe.data}-{part}")
        )
        tokens = torch.from_numpy(found.astype(np.int64))
        return (
            MaskedText(
                tokens,
                recipe.block,
                tokenizer.mask_token_id,
                len(tokenizer.all_special_ids),
                recipe.config["vocab_size"],
            )
            if masked
            else CausalText(tokens, recipe.block)
        )

    def judged(part: str) -> Dataset:
        found = lessons(part)
        return found.fixed() if isinstance(found, MaskedText) else found

    return Splits(
        lessons("train"),
        judged("valid") if recipe.schedule.evaluate_every else None,
        judged("test"),
        tokenizer.save_pretrained,
    )


def _tokenizer(recipe: TrainingRecipe, text: str, data: Path | None, begin: Path | None) -> Any:
    from transformers import AutoTokenizer

    if begin is not None and (begin / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(begin, local_files_only=True)
    vocabulary, masked = recipe.config["vocab_size"], recipe.task == "mlm"
    if recipe.data in INSTALLED:
        return shared_tokenizer(text, vocabulary, masked=masked)
    folder = data_folder(data, recipe.data)
    if recipe.tokenizer:
        return AutoTokenizer.from_pretrained(
            folder.there("its tokenizer", recipe.tokenizer), local_files_only=True
        )
    target = folder.prepared / f"{recipe.data}-tokenizer-{vocabulary}{'-masked' if masked else ''}"
    made = cached(
        target, lambda new: train_tokenizer(text, vocabulary, masked=masked).save_pretrained(new)
    )
    return AutoTokenizer.from_pretrained(made, local_files_only=True)


def _rows(recipe: TrainingRecipe, data: Path | None, begin: Path | None) -> Splits:
    """Texts with labels, as the tokens of the model that is begun from."""
    from transformers import AutoConfig, AutoTokenizer

    if begin is None:
        raise MismatchError(
            f"{recipe.data}: classifiers begin from a pretrained model; give its folder with --begin, one that bert-docs or books-bert gave"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(begin, local_files_only=True)
    most = AutoConfig.from_pretrained(begin, local_files_only=True).max_position_embeddings
    train, test = (
        _encoded(tokenizer, labelled_table(recipe, data, held_out=held), most)
        for held in (False, True)
    )
    mixed = torch.randperm(
        len(train.targets), generator=torch.Generator().manual_seed(0)
    )  # the same rows are held back whatever the seed
    return Splits(
        *_divided(recipe, map_tensors(train, lambda tensor: tensor[mixed])),
        test,
        tokenizer.save_pretrained,
    )


def _divided(
    recipe: TrainingRecipe, lessons: FixedSamples | Images | LabelledTexts
) -> tuple[Dataset, Dataset | None]:
    """What is learned; and the last of it, where looks are had: that is looked at instead."""
    if not recipe.schedule.evaluate_every:
        return lessons, None
    cut = len(lessons.targets) - len(lessons.targets) // HELD_BACK
    return map_tensors(lessons, lambda tensor: tensor[:cut]), map_tensors(
        lessons, lambda tensor: tensor[cut:]
    )


def _encoded(tokenizer: Any, data: str, most: int) -> LabelledTexts:
    found = read_rows(data)
    assert found.labels is not None
    columns = [list(column) for column in zip(*found.texts, strict=True)]
    encoded = tokenizer(
        *columns, padding=True, truncation=True, max_length=most, return_tensors="pt"
    )
    inputs: dict[str, Tensor] = {
        name: encoded[name]
        for name in ("input_ids", "attention_mask", "token_type_ids")
        if name in encoded
    }
    return LabelledTexts(
        inputs,
        inputs["attention_mask"].sum(1),
        torch.tensor([int(label) for label in found.labels]),
    )


LOADERS = {"image": _images, "clm": _language, "mlm": _language, "text": _rows}
