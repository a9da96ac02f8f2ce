"""A recipe's data in the form that training and tasks read; slow preparation is cached."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from symmerge.checkpoints.pretrained import from_local
from symmerge.evaluation.data.text import read_rows, read_text
from symmerge.evaluation.tasks.language import excerpts
from symmerge.lab.training.augmentation import RANDOM_NUMBERS, augment
from symmerge.lab.training.cache import cached, with_progress
from symmerge.lab.training.files import FILES, INSTALLED, DataFolder, data_folder
from symmerge.lab.training.images import read_image_set
from symmerge.lab.training.recipe import TrainingRecipe

# Start and end of the validation split, in percent of the characters; the test split follows.
VALIDATION = {
    "python-docs": (90, 100),
    "python-code": (90, 100),
    "shakespeare": (90, 95),
    "books": (99, 100),
}
IMAGES_AT_ONCE = 1000


def text_splits(recipe: TrainingRecipe, root: Path | None) -> dict[str, str]:
    """Running text: `train`, `valid` (only if the schedule validates) and `test`."""
    if recipe.data in INSTALLED:
        text, test = map(read_text, INSTALLED[recipe.data])
        share = VALIDATION[recipe.data][0] if recipe.schedule.evaluate_every else 100
        begin = len(text) * share // 100
        return {"train": text[:begin], "valid": text[begin:], "test": test}
    folder = data_folder(root, recipe.data)
    text = read_text(str(folder.file(recipe.data)))
    begin, end = (len(text) * share // 100 for share in VALIDATION[recipe.data])
    test = text[end:] or read_text(str(folder.file(recipe.data, held_out=True)))
    return {"train": text[:begin], "valid": text[begin:end], "test": test}


def prepare_images(folder: DataFolder, data: str, split: str) -> Path:
    """Shuffled images for tasks: `train`, `test`, or `augmented` (`train`, augmented once).

    Shuffled, because data sets are often sorted by class.
    """
    source = folder.file(data)

    def make(target: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        if split == "augmented":
            _write_augmented(target, prepare_images(folder, data, "train"), data, generator)
            return
        images, labels = read_image_set(data, source, split)
        order = torch.randperm(len(labels), generator=generator).numpy()
        np.savez(target, images=images[order], labels=labels[order])

    return cached(folder.prepared / f"{source.name.removesuffix('.npz')}-{split}.npz", make)


def _write_augmented(target: Path, source: Path, data: str, generator: torch.Generator) -> None:
    with np.load(source) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), arrays["labels"]
    noise = torch.rand(len(labels), RANDOM_NUMBERS, generator=generator)
    chunks = zip(images.split(IMAGES_AT_ONCE), noise.split(IMAGES_AT_ONCE), strict=True)
    changed = [
        (augment(chunk.float() / 255, numbers) * 255).round().byte()
        for chunk, numbers in with_progress(list(chunks), f"{data}, augmented, in thousands")
    ]
    np.savez(target, images=torch.cat(changed).numpy(), labels=labels)


def labelled_table(recipe: TrainingRecipe, root: Path | None, *, held_out: bool) -> str:
    """The file of a table of labelled texts."""
    if recipe.data in INSTALLED:
        return INSTALLED[recipe.data][held_out]
    return str(data_folder(root, recipe.data).file(recipe.data, held_out))


def held_out_data(
    recipe: TrainingRecipe, root: Path | None = None, begin: Path | None = None
) -> str:
    """The `data` of `make_task` for evaluation; none of it is used in training.

    `begin`: the model a classifier starts from; rows too long for it are left out.
    """
    return _task_data(recipe, root, begin, held_out=True)


def training_data(
    recipe: TrainingRecipe, root: Path | None = None, begin: Path | None = None
) -> str:
    """The data an alignment may use: training data, with augmented images, long texts excerpted."""
    return _task_data(recipe, root, begin, held_out=False)


def _task_data(
    recipe: TrainingRecipe, root: Path | None, begin: Path | None, *, held_out: bool
) -> str:
    if recipe.data in INSTALLED:
        return INSTALLED[recipe.data][held_out]
    folder = data_folder(root, recipe.data)
    if recipe.task == "image":
        split = "test" if held_out else "augmented" if recipe.augment else "train"
        return str(prepare_images(folder, recipe.data, split))
    if recipe.task == "text":
        table = labelled_table(recipe, root, held_out=held_out)
        return table if begin is None else str(_fitting_rows(Path(table), begin, folder.prepared))
    if held_out and FILES[recipe.data][0] != FILES[recipe.data][1]:
        return str(folder.file(recipe.data, held_out=True))
    split = "test" if held_out else "train"

    def write(file: Path) -> None:
        file.write_text("".join(excerpts(text_splits(recipe, root)[split])), "utf-8")

    return str(cached(folder.prepared / f"{recipe.data}-{split}.txt", write))


def _fitting_rows(table: Path, begin: Path, place: Path) -> Path:
    """The rows of a table that fit a model's positions; tasks refuse longer ones."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer: Any = from_local(AutoTokenizer, begin)
    positions = from_local(AutoConfig, begin).max_position_embeddings
    reader = f"{tokenizer.backend_tokenizer.to_str()}{positions}".encode()
    digest = hashlib.sha256(reader + table.read_bytes()).hexdigest()[:12]

    def write(target: Path) -> None:
        source = read_rows(str(table))
        assert source.labels is not None
        rows = [("label", "text", "text2")[: 1 + len(source.texts[0])]]
        for label, texts in zip(source.labels, source.texts, strict=True):
            if len(tokenizer(*texts, verbose=False)["input_ids"]) <= positions:
                rows.append((str(label), *texts))
        target.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8")

    return cached(place / f"{table.parent.name}-{table.stem}-{digest}.tsv", write)
