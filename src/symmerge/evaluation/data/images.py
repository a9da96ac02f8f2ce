"""Labelled images: the embedded digits, .npz files, folders with a subfolder per class, the hub."""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from symmerge.checkpoints.arrays import read_npz
from symmerge.checkpoints.limits import LARGEST_PICTURE, LONGEST_PICTURE, plain_size
from symmerge.errors import DataError
from symmerge.evaluation.data.embedded import digits
from symmerge.evaluation.data.hub import is_hub, read_hub
from symmerge.symmetry.spec import listing

DIGITS = {"digits": "test", "digits:train": "train"}  # for evaluation, and for calibration
# Of these suffixes, whatever a file is called: PIL would run Ghostscript for others.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
ARRAYS = (("x", "y"), ("images", "labels"), ("pixel_values", "labels"), ("x_test", "y_test"))
COLUMNS = (("image", "label"), ("img", "label"), ("image", "fine_label"))


DAMAGES = (  # PIL's, for damaged files
    *(OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(OverflowError, ZeroDivisionError, EOFError, struct.error, MemoryError, AssertionError),
)


@dataclass(frozen=True)
class LabelledImages:
    """Images (paths, 8-bit arrays or PIL images), each with a class number or name.

    `normalized` images are float arrays, ready for the model.
    """

    items: np.ndarray | Sequence[Any]
    labels: Sequence[object]
    normalized: bool = False


def read_images(data: str) -> LabelledImages:
    """Find the images and their labels; files are opened later, when they are needed."""
    if data in DIGITS:
        images, labels = digits(DIGITS[data])
        return LabelledImages(np.rint(images * 255).astype(np.uint8), labels.tolist())
    if is_hub(data):
        return _from_hub(data)
    if os.path.isdir(data):
        return _from_folder(Path(data))
    if data.endswith(".npz"):
        return _from_arrays(data)
    raise DataError(
        f"{data} holds no images: give digits, an .npz file,"
        " a folder with a subfolder per class, or a Hugging Face data set"
    )


def _from_hub(data: str) -> LabelledImages:
    rows = read_hub(data)
    columns = next((names for names in COLUMNS if set(names) <= set(rows.column_names)), None)
    if columns is None:
        raise DataError(
            f"{data} has no columns image and label; it has: {', '.join(rows.column_names)}."
            " Rename those you mean"
        )
    image, label = columns
    return LabelledImages(_Column(rows, image), list(rows[label]))


@dataclass(frozen=True)
class _Column(Sequence[object]):
    """One column of a data set, row by row: reading it at once would decode every image."""

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index][self.name]


def _from_folder(folder: Path) -> LabelledImages:
    classes = sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    files = [
        file
        for subfolder in classes
        for file in sorted(subfolder.iterdir())
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise DataError(
            f"{folder} has no images in subfolders:"
            f" make one subfolder per class and put {', '.join(SUFFIXES[:3])} files in it"
        )
    return LabelledImages(files, [file.parent.name for file in files])


def _from_arrays(data: str) -> LabelledImages:
    images, labels = _load_arrays(data)
    if images.ndim not in (3, 4) or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{data}: images {list(images.shape)} and labels {list(labels.shape)}"
            " do not match: give one label per image, [n, h, w, c]"
        )
    normalized = images.dtype.kind == "f"
    if not normalized and images.dtype != np.uint8:
        raise DataError(
            f"{data}: images are {images.dtype}: store them as uint8 [n, h, w, c],"
            " or as floats [n, c, h, w] normalized for the model"
        )
    _check_pixels(images, data) if normalized else _check_sides(images, data)
    return LabelledImages(images, labels.tolist(), normalized)


def _check_pixels(images: np.ndarray, data: str) -> None:
    """Refuse NaN, infinity and what float32 cannot hold: a loss would be NaN, and nobody told."""
    with np.errstate(over="ignore"):
        for number, image in enumerate(images):
            if not np.isfinite(image.astype(np.float32)).all():
                raise DataError(
                    f"{data}: image {number} has pixels that are NaN or infinite: correct it"
                )


def _check_sides(images: np.ndarray, data: str) -> None:
    height, width, *channels = images.shape[1:]
    if channels not in ([], [1], [3], [4]):
        raise DataError(
            f"{data}: images of shape {list(images.shape[1:])}: store them as uint8 [n, h, w, c]"
            " with 1, 3 or 4 channels"
        )
    if reason := _unusual(width, height):
        raise DataError(f"{data}: images have {reason}: make them smaller")


def _load_arrays(data: str) -> tuple[np.ndarray, ...]:
    try:
        content = read_npz(data, ARRAYS)
    except FileNotFoundError as error:
        raise DataError(
            f"{data} does not exist: give digits, hf:NAME, or a file or folder that exists"
        ) from error
    if isinstance(content, tuple):
        return content
    known = " or ".join("/".join(pair) for pair in ARRAYS)
    raise DataError(f"{data} has the arrays {listing(content) or 'none'}: needed are {known}")


def decode_image(item: Any, channels: int) -> np.ndarray:
    """One image as uint8, channels first."""
    from PIL import Image

    with _readable(item):
        if isinstance(item, np.ndarray):
            item = Image.fromarray(item[..., 0] if item.shape[2:] == (1,) else item)
        image = _open(item) if isinstance(item, Path) else item
        array = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def check_file(path: Path) -> None:
    """Refuse a file that is no image, or a huge one, by its first bytes."""
    with _readable(path):
        _open(path).close()


def _open(path: Path) -> Any:
    """A picture that is not decoded yet; one beyond the limit is a ValueError."""
    from PIL import Image

    plain_size(path)
    with warnings.catch_warnings():  # of 90 million pixels: our own limit is lower
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            image = Image.open(path, formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise ValueError(f"more than {LARGEST_PICTURE:,} pixels") from error
    if reason := _unusual(*image.size):
        image.close()
        raise ValueError(reason)
    return image


def _unusual(width: int, height: int) -> str | None:
    """What is wrong with these sides, if anything."""
    if width * height > LARGEST_PICTURE:
        return f"{width} x {height} pixels, {LARGEST_PICTURE:,} in all at most"
    if max(width, height) > LONGEST_PICTURE * min(width, height):
        return f"{width} x {height} pixels, one side {LONGEST_PICTURE} times the other at most"
    return None


@contextmanager
def _readable(item: object) -> Iterator[None]:
    try:
        yield
    except DAMAGES as error:
        what = str(item) if isinstance(item, Path) else "an image of the data"
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
        raise DataError(
            f"{what} cannot be read as an image ({reason}): replace or remove it"
        ) from error
