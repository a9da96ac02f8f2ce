"""Image data sets: sizes, channel statistics, and readers of their file formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from symmerge.checkpoints.arrays import read_npz
from symmerge.errors import DataError
from symmerge.lab.training.cifar import read_cifar
from symmerge.lab.training.tiny_imagenet import read_tiny_imagenet

Arrays = tuple[np.ndarray, np.ndarray]
Channels = tuple[float, float, float]


@dataclass(frozen=True)
class ImageSet:
    """Side of an image, number of classes, and the channels' mean and std in [0, 1]."""

    side: int
    classes: int
    mean: Channels
    std: Channels


IMAGE_SETS: Mapping[str, ImageSet] = {
    "cifar10": ImageSet(32, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ImageSet(32, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "tiny-imagenet": ImageSet(64, 200, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}
FOLDERS: Mapping[str, Callable[[Path, str], Arrays]] = {
    "cifar-10-batches-py": read_cifar,
    "cifar-100-python": read_cifar,
    "tiny-imagenet-200": read_tiny_imagenet,
}
"""Readers of the published folders, by folder name."""


def read_image_set(data: str, place: Path, split: str) -> Arrays:
    """Images as uint8 [n, side, side, 3] and labels of `train` or `test`.

    `place` is an .npz file with plain arrays, or a published folder.
    """
    reader = _read_npz if place.suffix == ".npz" else FOLDERS[place.name]
    images, labels = reader(place, split)
    labels = np.asarray(labels).reshape(-1)
    where = f"{place}, {split} split"
    _check_arrays(data, where, images, labels)
    _check_classes(data, where, set(labels.tolist()), complete=split == "train")
    return images, labels.astype(np.int64)


def _check_arrays(data: str, where: str, images: np.ndarray, labels: np.ndarray) -> None:
    side = IMAGE_SETS[data].side
    if images.dtype != np.uint8 or images.shape[1:] != (side, side, 3):
        raise DataError(
            f"{where}: images are {images.dtype} {list(images.shape)},"
            f" those of {data} must be uint8 [n, {side}, {side}, 3]"
        )
    if len(images) != len(labels) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{where}: {len(images)} images and {len(labels)} labels ({labels.dtype}):"
            " every image needs an integer label"
        )


def _check_classes(data: str, where: str, labels: set[int], *, complete: bool) -> None:
    count = IMAGE_SETS[data].classes
    classes = set(range(count))
    if unknown := sorted(labels - classes):
        raise DataError(f"{where}: unknown class {unknown[0]}, {data} has 0 to {count - 1}")
    if complete and (absent := sorted(classes - labels)):
        listed = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
        raise DataError(
            f"{where}: no images of {len(absent)} of the {count} classes of {data} ({listed}):"
            " is it complete, and the right data set?"
        )


def _read_npz(file: Path, split: str) -> Arrays:
    try:
        content = read_npz(file, [(f"x_{split}", f"y_{split}")])
    except FileNotFoundError as error:
        raise DataError(f"{file} is missing: put it there, or give another --data-dir") from error
    if isinstance(content, tuple):
        return content[0], content[1]
    if f"d_{split}" in content:
        raise DataError(
            f"{file} is compressed, not plain arrays: convert it with `python load_data.py IN OUT`"
            " (the script next to the data)"
        )
    raise DataError(
        f"{file} has no x_{split} and y_{split}:"
        " write them with numpy.savez, images as uint8 [n, side, side, 3]"
    )
