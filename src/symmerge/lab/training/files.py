"""Data sets in a folder: which files they are, the parts they have, and what tasks read of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from symmerge.checkpoints.hashes import path_digest
from symmerge.errors import DataError
from symmerge.evaluation.data.embedded import SPLITS, python_docs
from symmerge.evaluation.data.text import read_rows, read_text
from symmerge.lab.training.augmentation import RANDOM_NUMBERS, augment
from symmerge.lab.training.cache import cached, with_progress
from symmerge.lab.training.pictures import read_pictures
from symmerge.lab.training.recipe import TrainingRecipe

INSTALLED = {
    name: (f"{name}:train", name) for name in ("digits", "python-docs", "python-topics")
}  # what to learn from, what to measure on
# name -> the file to learn from, and the one to measure on: the same, where it is divided here
FILES = {
    "cifar10": ("cifar10.npz", "cifar10.npz"),
    "cifar100": ("cifar100.npz", "cifar100.npz"),
    "tiny-imagenet": ("tiny-imagenet.npz", "tiny-imagenet.npz"),
    "shakespeare": ("tinyshakespeare.txt", "tinyshakespeare.txt"),
    "books": ("books_train.txt.xz", "books_valid.txt.xz"),
    "sst2": ("sst2/train.tsv", "sst2/dev.tsv"),
    "cola": ("cola/train.tsv", "cola/dev.tsv"),
    "mrpc": ("mrpc/train.tsv", "mrpc/test.tsv"),
    "rte": ("rte/train.tsv", "rte/dev.tsv"),
    "agnews": ("agnews/train.tsv", "agnews/test.tsv"),
}
# name -> the folder as it is published, which does as well
PUBLISHED_AS = {
    "cifar10": ("cifar-10-batches-py",),
    "cifar100": ("cifar-100-python",),
    "tiny-imagenet": ("tiny-imagenet-200",),
}
SHARES = {
    "python-docs": (90, 100),
    "shakespeare": (90, 95),
    "books": (99, 100),
}  # percent of the characters where validation begins and ends
SOME = 1000  # pictures that are changed at a time
SLICES, SLICE = (
    8,
    1_000_000,
)  # of a long text, evenly: two million tokens to learn an alignment from


@dataclass(frozen=True)
class DataFolder:
    """Where data sets are, and where what is made of them is kept."""

    root: Path
    prepared: Path

    def file(self, data: str, held_out: bool = False) -> Path:
        """A file of a data set, or the folder it is published as."""
        return self.there(
            f"the data set {data}", FILES[data][held_out], *PUBLISHED_AS.get(data, ())
        )

    def there(self, what: str, *names: str) -> Path:
        """The first of these that is there; where none is, that is refused with its place."""
        found = next((self.root / name for name in names if (self.root / name).exists()), None)
        if found is None:
            instead = "".join(f", or the folder {name} beside it" for name in names[1:])
            raise DataError(
                f"{self.root / names[0]} is missing, and {what} is read from it: put it there{instead}, or give another folder with --data"
            )
        return found


def describe_files(data: str) -> str:
    """What a folder must hold for a data set, in words."""
    return " and ".join(dict.fromkeys(FILES[data])) + "".join(
        f" (or the folder {name})" for name in PUBLISHED_AS.get(data, ())
    )


def data_folder(root: Path | None, data: str) -> DataFolder:
    """The folder given, or the one that SYMMERGE_DATA names. Prepared files go beside the data, or to SYMMERGE_CACHE."""
    chosen = root or os.environ.get("SYMMERGE_DATA")
    if not chosen:
        raise DataError(
            f"{data} does not come with the installation: put {describe_files(data)} into a folder and give it with --data"
        )
    path = Path(chosen)
    # The mode is asked, too: root may write to folders that are meant to stay as they are.
    open_to_all = path.is_dir() and path.stat().st_mode & 0o222 and os.access(path, os.W_OK)
    elsewhere = (
        Path.home()
        / ".cache"
        / "symmerge"
        / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    )
    return DataFolder(
        path,
        Path(os.environ.get("SYMMERGE_CACHE") or (path / "prepared" if open_to_all else elsewhere)),
    )


def check_data(recipe: TrainingRecipe, root: Path | None) -> None:
    """That everything a recipe reads is there; it may still turn out to be something else."""
    _files(recipe, root)


def _files(recipe: TrainingRecipe, root: Path | None) -> dict[str, Path]:
    """Everything a recipe reads that does not come with the installation, by name; what is missing is refused."""
    if recipe.data in INSTALLED:
        return {}
    folder = data_folder(root, recipe.data)
    found = [folder.file(recipe.data), folder.file(recipe.data, held_out=True)]
    if recipe.tokenizer:
        found.append(folder.there("its tokenizer", recipe.tokenizer))
    return {file.relative_to(folder.root).as_posix(): file for file in found}


def digests(recipes: Iterable[TrainingRecipe], root: Path | None) -> dict[str, str]:
    """What recipes read, by name, each with a hash of what it is, computed once; digits never change. Precondition: all of it is there."""
    recipes, files = list(recipes), {}
    for recipe in recipes:
        files |= _files(recipe, root)
    found = {name: path_digest(file) for name, file in files.items()}
    if any(recipe.data in INSTALLED and recipe.data != "digits" for recipe in recipes):
        found["Python's documentation"] = hashlib.sha256(
            "".join(map(python_docs, SPLITS)).encode()
        ).hexdigest()
    return found


def has_data(recipe: TrainingRecipe, root: Path | None) -> bool:
    """Whether it is there."""
    try:
        check_data(recipe, root)
    except DataError:
        return False
    return True


def text_splits(recipe: TrainingRecipe, root: Path | None) -> dict[str, str]:
    """Running text to train on, to look at while training (where that is asked for), and to test on."""
    if recipe.data in INSTALLED:
        text, test = python_docs("train"), python_docs("test")
        begin = (
            len(text) * SHARES[recipe.data][0] // 100
            if recipe.schedule.evaluate_every
            else len(text)
        )
        return {"train": text[:begin], "valid": text[begin:], "test": test}
    folder = data_folder(root, recipe.data)
    text = read_text(str(folder.file(recipe.data)))
    begin, end = (len(text) * share // 100 for share in SHARES[recipe.data])
    return {
        "train": text[:begin],
        "valid": text[begin:end],
        "test": text[end:] or read_text(str(folder.file(recipe.data, held_out=True))),
    }


def prepare_images(folder: DataFolder, data: str, part: str) -> Path:
    """Pictures as tasks read them, shuffled, as data is often sorted by class: `train`, `test`, or `augmented`: the training part, changed once."""
    source = folder.file(data)

    def make(target: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        if part == "augmented":
            with np.load(prepare_images(folder, data, "train")) as found:
                images, labels = torch.from_numpy(found["images"]), found["labels"]
            noise = torch.rand(len(labels), RANDOM_NUMBERS, generator=generator)
            some = list(zip(images.split(SOME), noise.split(SOME), strict=True))
            changed = [
                (augment(batch.float() / 255, by) * 255).round().byte()
                for batch, by in with_progress(some, f"{data}, changed, in thousands")
            ]
            np.savez(target, images=torch.cat(changed).numpy(), labels=labels)
            return
        images, labels = read_pictures(data, source, part)
        order = torch.randperm(len(labels), generator=generator).numpy()
        np.savez(target, images=images[order], labels=labels[order])

    return cached(folder.prepared / f"{source.name.removesuffix('.npz')}-{part}.npz", make)


def labelled_table(recipe: TrainingRecipe, root: Path | None, *, held_out: bool) -> str:
    """A table of texts with labels."""
    return (
        INSTALLED[recipe.data][held_out]
        if recipe.data in INSTALLED
        else str(data_folder(root, recipe.data).file(recipe.data, held_out))
    )


def held_out_data(
    recipe: TrainingRecipe, data_root: Path | None = None, begin: Path | None = None
) -> str:
    """What `make_task` measures on: none of it was seen in training. `begin`: the model a classifier starts from; rows too long for it are left out."""
    return _for_tasks(recipe, data_root, begin, held=True)


def training_data(
    recipe: TrainingRecipe, data_root: Path | None = None, begin: Path | None = None
) -> str:
    """What an alignment may look at or learn from: training data, pictures changed as in training, long texts in part."""
    return _for_tasks(recipe, data_root, begin, held=False)


def _for_tasks(recipe: TrainingRecipe, root: Path | None, begin: Path | None, *, held: bool) -> str:
    if recipe.data in INSTALLED:
        return INSTALLED[recipe.data][held]
    folder = data_folder(root, recipe.data)
    if recipe.task == "image":
        return str(
            prepare_images(
                folder, recipe.data, "test" if held else "augmented" if recipe.augment else "train"
            )
        )
    if recipe.task == "text":
        table = labelled_table(recipe, root, held_out=held)
        return table if begin is None else str(_fitting(Path(table), begin, folder.prepared))
    if held and FILES[recipe.data][0] != FILES[recipe.data][1]:
        return str(folder.file(recipe.data, held_out=True))
    part = "test" if held else "train"
    return str(
        cached(
            folder.prepared / f"{recipe.data}-{part}.txt",
            lambda file: file.write_text(_some(text_splits(recipe, root)[part]), "utf-8"),
        )
    )


def _some(text: str) -> str:
    if len(text) <= SLICES * SLICE:
        return text
    return "".join(text[at * len(text) // SLICES :][:SLICE] for at in range(SLICES))


def _fitting(table: Path, begin: Path, place: Path) -> Path:
    """The rows of a table that a model has positions for: tasks refuse tables with others."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(begin, local_files_only=True)
    most = AutoConfig.from_pretrained(begin, local_files_only=True).max_position_embeddings
    digest = hashlib.sha256(
        f"{tokenizer.backend_tokenizer.to_str()}{most}".encode() + table.read_bytes()
    ).hexdigest()[:12]

    def make(target: Path) -> None:
        found = read_rows(str(table))
        assert found.labels is not None
        table_rows = [("label", "text", "text2")[: 1 + len(found.texts[0])]]
        for label, text_splits in zip(found.labels, found.texts, strict=True):
            if len(tokenizer(*text_splits, verbose=False)["input_ids"]) <= most:
                table_rows.append((str(label), *text_splits))
        target.write_text("".join("\t".join(row) + "\n" for row in table_rows), "utf-8")

    return cached(place / f"{table.parent.name}-{table.stem}-{digest}.tsv", make)
