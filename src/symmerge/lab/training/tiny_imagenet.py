"""Tiny ImageNet from its published folder: JPEGs in one folder per WordNet number."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from symmerge.errors import DataError
from symmerge.evaluation.data.images import decode_image
from symmerge.lab.training.cache import with_progress

PATTERNS = ("*.JPEG", "*.jpeg", "*.jpg", "*.JPG")
UNPACK = "unpack the whole archive again"


def read_tiny_imagenet(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """RGB images and labels; a label is the index of the WordNet id in sorted order.

    Its own test split has no labels, so `test` is its `val`.
    """
    train = _existing(root / "train")
    numbers = sorted(path.name for path in train.iterdir() if path.is_dir())
    rows = _train_rows(root, numbers) if split == "train" else _val_rows(root, numbers)
    if not rows:
        raise DataError(f"{root} has no images of its {split} split: {UNPACK}")
    files = [file for file, _ in rows]
    progress = with_progress(files, f"{root.name}, {split} split")
    images = [decode_image(file, 3).transpose(1, 2, 0) for file in progress]
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            raise DataError(f"{file} differs in size from {files[0]}: is it part of the data set?")
    return np.stack(images), np.array([label for _, label in rows], np.int64)


def _train_rows(root: Path, numbers: list[str]) -> list[tuple[Path, int]]:
    folders = [_existing(root / "train" / number / "images") for number in numbers]
    return [
        (file, label)
        for label, folder in enumerate(folders)
        for file in sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})
    ]


def _val_rows(root: Path, numbers: list[str]) -> list[tuple[Path, int]]:
    """Images and labels of `val`; lines of its table are file, WordNet id, bounding box."""
    table = _existing(root / "val" / "val_annotations.txt")
    labels = {number: label for label, number in enumerate(numbers)}
    rows = []
    for line, content in enumerate(table.read_text("utf-8").splitlines(), 1):
        file, number = [*content.split("\t"), ""][:2]
        if number not in labels:
            raise DataError(
                f"{table}, line {line}: {number or content!r} is not a class of the training split:"
                f" {UNPACK}"
            )
        rows.append((_existing(root / "val" / "images" / file), labels[number]))
    return rows


def _existing(path: Path) -> Path:
    if not path.exists():
        raise DataError(f"{path} is missing: {UNPACK}, and leave its folders as they are")
    return path
