"""A recipe's data as splits, with the tokenizer or image processor that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from symmerge.checkpoints.files import write_json
from symmerge.checkpoints.pretrained import from_local
from symmerge.errors import MismatchError
from symmerge.evaluation.data.embedded import digits
from symmerge.evaluation.data.text import read_rows, read_text
from symmerge.evaluation.tasks.preprocessing import TokenizerByContent, by_content
from symmerge.lab.training.cache import cached
from symmerge.lab.training.datasets import (
    CausalText,
    Continued,
    Dataset,
    FixedSamples,
    Images,
    LabelledTexts,
    MaskedText,
    map_tensors,
)
from symmerge.lab.training.files import INSTALLED, data_folder
from symmerge.lab.training.images import IMAGE_SETS
from symmerge.lab.training.prepared import labelled_table, prepare_images, text_splits
from symmerge.lab.training.recipe import TrainingRecipe
from symmerge.lab.training.tokens import cached_tokens, tokenize, train_tokenizer

MEAN, STD = 0.5, 0.5  # of the digits
HELD_BACK = 10  # one in ten training samples is held back, if the schedule validates
ENCODED = ("input_ids", "attention_mask", "token_type_ids")
# Cached, as all seeds share them: saves 0.4 s per model on Python's documentation.
shared_tokenizer = lru_cache(maxsize=4)(train_tokenizer)


@dataclass(frozen=True)
class Splits:
    """Training, validation and test data, and the files to save beside the weights."""

    train: Dataset
    valid: Dataset | None
    test: Dataset
    save: Callable[[Path], object]


def load_splits(
    recipe: TrainingRecipe, data: Path | None = None, begin: Path | None = None
) -> Splits:
    """The splits of a recipe. A pretrained model (`begin`) brings its own tokenizer."""
    return LOADERS[recipe.task](recipe, data, begin)


def _image_splits(recipe: TrainingRecipe, data: Path | None, _: Path | None) -> Splits:
    if recipe.data in INSTALLED:
        train, test = _digits("train"), _digits("test")
        mean, std = [MEAN], [STD]
    else:
        folder, name = data_folder(data, recipe.data), recipe.data
        train, test = (
            _images(name, prepare_images(folder, name, split)) for split in ("train", "test")
        )
        mean, std = list(IMAGE_SETS[name].mean), list(IMAGE_SETS[name].std)
    side = recipe.config["image_size"]
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": side, "width": side},
        "image_mean": mean,
        "image_std": std,
    }

    def save(folder: Path) -> None:
        write_json(folder / "preprocessor_config.json", processor)

    if recipe.kept_by == "test":
        return Splits(train, test, test, save)
    return Splits(*_with_validation(recipe, train), test, save)


def _digits(split: str) -> FixedSamples:
    """Digits without augmentation: shifts by a pixel make the task harder, and two seeds then
    learn features that no symmetry relates."""
    images, labels = digits(split)
    # Quantized to 8 bits, as the image processor sees them.
    scaled = np.rint(images * 255).astype(np.float32) / 255
    pixels = torch.from_numpy((scaled - MEAN) / STD)[:, None]
    return FixedSamples({"pixel_values": pixels}, torch.from_numpy(labels))


def _images(data: str, file: Path) -> Images:
    mean, std = IMAGE_SETS[data].mean, IMAGE_SETS[data].std
    with np.load(file) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return Images(images, labels, mean, std)


def _language_splits(recipe: TrainingRecipe, data: Path | None, begin: Path | None) -> Splits:
    texts, vocab_size = text_splits(recipe, data), recipe.config["vocab_size"]
    tokenizer = _tokenizer(recipe, texts["train"], data, begin)
    if len(tokenizer) > vocab_size:
        raise MismatchError(
            f"the tokenizer has {len(tokenizer)} tokens, {recipe.architecture} {vocab_size}:"
            " change vocab_size"
        )
    place = None if recipe.data in INSTALLED else data_folder(data, recipe.data).prepared

    def load(split: str) -> CausalText | MaskedText | Continued:
        text, name = texts[split], f"{recipe.data}-{split}"
        ids = (
            cached_tokens(tokenizer, text, place, name)
            if place
            else _shared_tokens(by_content(tokenizer), text)
        )
        tokens = torch.from_numpy(ids.astype(np.int64))
        if recipe.task == "seq2seq":
            return Continued(tokens, recipe.block, recipe.config["decoder_start_token_id"])
        if recipe.task != "mlm":
            return CausalText(tokens, recipe.block)
        special = len(tokenizer.all_special_ids)
        return MaskedText(tokens, recipe.block, tokenizer.mask_token_id, special, vocab_size)

    def load_fixed(split: str) -> Dataset:
        dataset = load(split)
        return dataset.fixed() if isinstance(dataset, MaskedText) else dataset

    valid = load_fixed("valid") if recipe.schedule.evaluate_every else None
    return Splits(load("train"), valid, load_fixed("test"), tokenizer.save_pretrained)


@lru_cache(maxsize=8)
def _shared_tokens(key: TokenizerByContent, text: str) -> np.ndarray:
    return tokenize(key.tokenizer, text)


def _tokenizer(recipe: TrainingRecipe, text: str, data: Path | None, begin: Path | None) -> Any:
    from transformers import AutoTokenizer

    if begin is not None and (begin / "tokenizer.json").exists():
        return from_local(AutoTokenizer, begin)
    vocabulary, masked = recipe.config["vocab_size"], recipe.task == "mlm"
    if recipe.data in INSTALLED:
        text = read_text(f"{recipe.tokenizer}:train") if recipe.tokenizer else text
        return shared_tokenizer(text, vocabulary, masked=masked)
    folder = data_folder(data, recipe.data)
    if recipe.tokenizer:
        place = folder.existing("its tokenizer", recipe.tokenizer)
        return from_local(AutoTokenizer, place)

    def write(target: Path) -> None:
        train_tokenizer(text, vocabulary, masked=masked).save_pretrained(target)

    name = f"{recipe.data}-tokenizer-{vocabulary}{'-masked' if masked else ''}"
    return from_local(AutoTokenizer, cached(folder.prepared / name, write))


def _labelled_splits(recipe: TrainingRecipe, data: Path | None, begin: Path | None) -> Splits:
    """Labelled texts, tokenized with the pretrained model's tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    if begin is None:
        raise MismatchError(
            f"{recipe.data}: classifiers start from a pretrained model;"
            " give its folder with --begin, for example one trained by bert-docs or books-bert"
        )
    tokenizer: Any = from_local(AutoTokenizer, begin)
    positions = from_local(AutoConfig, begin).max_position_embeddings
    train, test = (
        _encoded(tokenizer, labelled_table(recipe, data, held_out=held_out), positions)
        for held_out in (False, True)
    )
    # One order for all seeds: the same rows are held back.
    order = torch.randperm(len(train.targets), generator=torch.Generator().manual_seed(0))
    shuffled = map_tensors(train, lambda tensor: tensor[order])
    return Splits(*_with_validation(recipe, shuffled), test, tokenizer.save_pretrained)


def _with_validation(
    recipe: TrainingRecipe, dataset: FixedSamples | Images | LabelledTexts
) -> tuple[Dataset, Dataset | None]:
    """Training and validation samples: the last ones are held back if the schedule validates."""
    if not recipe.schedule.evaluate_every:
        return dataset, None
    count = len(dataset.targets) - len(dataset.targets) // HELD_BACK
    train = map_tensors(dataset, lambda tensor: tensor[:count])
    return train, map_tensors(dataset, lambda tensor: tensor[count:])


def _encoded(tokenizer: Any, data: str, max_length: int) -> LabelledTexts:
    table = read_rows(data)
    assert table.labels is not None
    columns = [list(column) for column in zip(*table.texts, strict=True)]
    options = {"padding": True, "truncation": True, "return_tensors": "pt"}
    encoded = tokenizer(*columns, max_length=max_length, **options)
    inputs = {name: encoded[name] for name in ENCODED if name in encoded}
    labels = torch.tensor([int(label) for label in table.labels])
    return LabelledTexts(inputs, inputs["attention_mask"].sum(1), labels)


LOADERS = {
    "image": _image_splits,
    "clm": _language_splits,
    "mlm": _language_splits,
    "seq2seq": _language_splits,
    "text": _labelled_splits,
}
