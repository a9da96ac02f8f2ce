"""Data sets of pictures: what they are, and how each is read from the forms that people have it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from symmerge.errors import DataError
from symmerge.lab.training.plainpickle import read_plain
from symmerge.lab.training.planes import decoded
from symmerge.lab.training.wordnet import read_tree

Arrays = tuple[np.ndarray, np.ndarray]
Colours = tuple[float, float, float]


@dataclass(frozen=True)
class PictureSet:
    """Pictures of one side and so many classes; the mean and the deviation of their training part, red, green and blue, from 0 to 1."""

    side: int
    classes: int
    mean: Colours
    std: Colours


SETS: Mapping[str, PictureSet] = {
    "cifar10": PictureSet(32, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": PictureSet(32, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "tiny-imagenet": PictureSet(64, 200, (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}


def read_pictures(data: str, place: Path, part: str) -> Arrays:
    """Pictures [n, side, side, 3] in 8 bits and their classes, of `train` or `test`: from an .npz file, or from the folder as it is published."""
    reader = _from_arrays if place.suffix == ".npz" else FOLDERS[place.name]
    images, labels = reader(place, part)
    return _checked(data, place, part, images, np.asarray(labels).reshape(-1))


def _checked(data: str, place: Path, part: str, images: np.ndarray, labels: np.ndarray) -> Arrays:
    wanted, where = SETS[data], f"{place}, {part} part"
    shape = (wanted.side, wanted.side, 3)
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise DataError(
            f"{where}: pictures are {images.dtype} {list(images.shape)}, those of {data} are uint8 [n, {wanted.side}, {wanted.side}, 3]"
        )
    if len(images) != len(labels) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{where}: {len(images)} pictures and {len(labels)} labels ({labels.dtype}): there is a whole number to every picture"
        )
    found, known = set(labels.tolist()), set(range(wanted.classes))
    if others := sorted(found - known):
        raise DataError(
            f"{where}: there is a class {others[0]}, and {data} has {wanted.classes} of them, from 0 on"
        )
    if part == "train" and (lacking := sorted(known - found)):
        few = ", ".join(map(str, lacking[:5])) + (", ..." if len(lacking) > 5 else "")
        raise DataError(
            f"{where}: no pictures of {len(lacking)} of the {wanted.classes} classes of {data} ({few}): is it whole, and this data set?"
        )
    return images, labels.astype(np.int64)


def _from_arrays(file: Path, part: str) -> Arrays:
    try:
        with np.load(file, allow_pickle=False) as found:
            if f"y_{part}" in found and f"x_{part}" in found:
                return found[f"x_{part}"], found[f"y_{part}"]
            if f"y_{part}" in found and f"d_{part}" in found:
                labels = found[f"y_{part}"]
                return decoded(
                    found[f"d_{part}"].tobytes(), found[f"o_{part}"], len(labels), found["q"]
                ), labels
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(
            f"{file} is not an .npz file that can be read without running code ({error}): write it with numpy.savez"
        ) from error
    raise DataError(
        f"{file} has no x_{part} and y_{part}: write them with numpy.savez, pictures as uint8 [n, side, side, 3]"
    )


def _batches(names: Mapping[str, tuple[str, ...]], labels: str) -> Callable[[Path, str], Arrays]:
    """Reads pickles with a picture to a row: all of its red, then green, then blue."""

    def read(folder: Path, part: str) -> Arrays:
        images, classes = zip(*(_batch(folder / name, labels) for name in names[part]), strict=True)
        return np.concatenate(images), np.concatenate(classes)

    return read


def _batch(file: Path, labels: str) -> Arrays:
    if not file.exists():
        raise DataError(f"{file} is missing: unpack the whole archive again")
    found = read_plain(file)
    if not {"data", labels} <= found.keys():
        raise DataError(
            f"{file} has {', '.join(found) or 'nothing'}; needed are data and {labels}: is it another data set?"
        )
    rows = np.asarray(found["data"])
    if rows.ndim != 2 or rows.shape[1] != 3 * 32 * 32:
        raise DataError(
            f"{file}: data is {list(rows.shape)}, and a row of it should be a picture: 3 x 32 x 32"
        )
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.asarray(found[labels])


TEN = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
HUNDRED = {"train": ("train",), "test": ("test",)}
FOLDERS: Mapping[str, Callable[[Path, str], Arrays]] = {
    "cifar-10-batches-py": _batches(TEN, "labels"),
    "cifar-100-python": _batches(HUNDRED, "fine_labels"),
    "tiny-imagenet-200": read_tree,
}
"""The published folders by name."""
