"""Data sets in a folder: which files they consist of, where they are, and their hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from symmerge.checkpoints.hashes import path_digest
from symmerge.errors import DataError
from symmerge.evaluation.data.embedded import SPLITS, python_docs
from symmerge.evaluation.data.text import read_text
from symmerge.lab.training.recipe import TrainingRecipe

# Data that comes with the installation -> names of its training and test split.
INSTALLED = {
    name: (f"{name}:train", name)
    for name in ("digits", "python-docs", "python-code", "python-topics")
}
# Training file and test file; the same one where we make the split.
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
# Published folders that are accepted instead.
PUBLISHED_AS = {
    "cifar10": ("cifar-10-batches-py",),
    "cifar100": ("cifar-100-python",),
    "tiny-imagenet": ("tiny-imagenet-200",),
}


@dataclass(frozen=True)
class DataFolder:
    """The folder of data sets, and the cache for files prepared from them."""

    root: Path
    prepared: Path

    def file(self, data: str, held_out: bool = False) -> Path:
        """A file of a data set, or its published folder."""
        names = FILES[data][held_out], *PUBLISHED_AS.get(data, ())
        return self.existing(f"the data set {data}", *names)

    def existing(self, what: str, *names: str) -> Path:
        """The first of these paths that exists; otherwise an error that says where to put it."""
        for name in names:
            if (self.root / name).exists():
                return self.root / name
        instead = "".join(f", or the folder {name} next to it" for name in names[1:])
        raise DataError(
            f"{self.root / names[0]} is missing, but {what} is read from it:"
            f" put it there{instead}, or give another folder with --data-dir"
        )


def describe_files(data: str) -> str:
    """What a folder must contain for a data set."""
    published = "".join(f" (or the folder {name})" for name in PUBLISHED_AS.get(data, ()))
    return " and ".join(dict.fromkeys(FILES[data])) + published


def data_folder(root: Path | None, data: str) -> DataFolder:
    """`root`, or the folder that SYMMERGE_DATA names.

    Prepared files go to SYMMERGE_CACHE, or beside the data, or to ~/.cache where that is read-only.
    """
    chosen = root or os.environ.get("SYMMERGE_DATA")
    if not chosen:
        raise DataError(
            f"{data} does not come with the installation:"
            f" put {describe_files(data)} into a folder and give it with --data-dir"
        )
    path = Path(chosen)
    if cache := os.environ.get("SYMMERGE_CACHE"):
        return DataFolder(path, Path(cache))
    # Check the mode bits, too: root can write to read-only folders.
    writable = path.is_dir() and path.stat().st_mode & 0o222 and os.access(path, os.W_OK)
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    elsewhere = Path.home() / ".cache" / "symmerge" / digest
    return DataFolder(path, path / "prepared" if writable else elsewhere)


def check_data(recipe: TrainingRecipe, root: Path | None) -> None:
    """Check that every file of a recipe exists; contents are checked when they are read."""
    _files(recipe, root)


def _files(recipe: TrainingRecipe, root: Path | None) -> dict[str, Path]:
    """The files of a recipe by name; a missing one is an error."""
    if recipe.data in INSTALLED:
        return {}
    folder = data_folder(root, recipe.data)
    files = [folder.file(recipe.data), folder.file(recipe.data, held_out=True)]
    if recipe.tokenizer:
        files.append(folder.existing("its tokenizer", recipe.tokenizer))
    return {file.relative_to(folder.root).as_posix(): file for file in files}


def digests(recipes: Iterable[TrainingRecipe], root: Path | None) -> dict[str, str]:
    """Hashes of the files that recipes read, by name. Precondition: all of them exist.

    Python's documentation and library count as files; the digits never change.
    """
    recipes = list(recipes)
    files = {name: file for recipe in recipes for name, file in _files(recipe, root).items()}
    hashes = {name: path_digest(file) for name, file in files.items()}
    if any(recipe.data in INSTALLED and recipe.data != "digits" for recipe in recipes):
        docs = "".join(map(python_docs, SPLITS))
        hashes["Python's documentation"] = hashlib.sha256(docs.encode()).hexdigest()
    if any(recipe.data == "python-code" for recipe in recipes):
        code = "".join(map(read_text, INSTALLED["python-code"]))
        hashes["Python's library"] = hashlib.sha256(code.encode()).hexdigest()
    return hashes


def has_data(recipe: TrainingRecipe, root: Path | None) -> bool:
    """Whether every file of a recipe exists."""
    try:
        check_data(recipe, root)
    except DataError:
        return False
    return True
