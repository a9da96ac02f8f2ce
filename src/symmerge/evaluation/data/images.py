"""Labelled images: the embedded digits, .npz files, folders with a subfolder per class, the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from symmerge.errors import DataError
from symmerge.evaluation.data.embedded import digits
from symmerge.evaluation.data.hub import is_hub, read_hub

DIGITS = {"digits": "test", "digits:train": "train"}  # for evaluation, and for calibration
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
ARRAYS = (("x", "y"), ("images", "labels"), ("pixel_values", "labels"), ("x_test", "y_test"))
COLUMNS = (("image", "label"), ("img", "label"), ("image", "fine_label"))


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
    if Path(data).is_dir():
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
    if len(images) != len(labels) or images.ndim not in (3, 4) or labels.ndim != 1:
        raise DataError(
            f"{data}: images {list(images.shape)} and labels {list(labels.shape)}"
            " do not belong together: give one label per image, [n, h, w, c]"
        )
    normalized = np.issubdtype(images.dtype, np.floating)
    if not normalized and images.dtype != np.uint8:
        raise DataError(
            f"{data}: images are {images.dtype}: store them as uint8 [n, h, w, c],"
            " or as floats [n, c, h, w] normalized for the model"
        )
    return LabelledImages(images, labels.tolist(), bool(normalized))


def _load_arrays(data: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(data, allow_pickle=False) as file:
            for images, labels in ARRAYS:
                if {images, labels} <= set(file.files):
                    return file[images], file[labels]
            names = ", ".join(file.files) or "none"
    except FileNotFoundError as error:
        raise DataError(
            f"{data} is not there: give digits, hf:NAME, or a file or folder that exists"
        ) from error
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(
            f"{data} is not an .npz file that can be read without running code ({error}):"
            " write it with numpy.savez"
        ) from error
    known = " or ".join("/".join(pair) for pair in ARRAYS)
    raise DataError(f"{data} has the arrays {names}; needed are {known}")


def decode_image(item: Any, channels: int) -> np.ndarray:
    """One image as uint8, channels first."""
    from PIL import Image

    with _readable(item):
        if isinstance(item, np.ndarray):
            item = Image.fromarray(item[..., 0] if item.shape[2:] == (1,) else item)
        image = Image.open(item) if isinstance(item, Path) else item
        array = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def check_file(path: Path) -> None:
    """Refuse a file that is no image, by its first bytes, before anything is computed."""
    from PIL import Image

    with _readable(path):
        Image.open(path).close()


@contextmanager
def _readable(item: object) -> Iterator[None]:
    try:
        yield
    except (OSError, SyntaxError, ValueError, TypeError) as error:  # PIL's for damaged files
        what = str(item) if isinstance(item, Path) else "an image of the data"
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"{what} cannot be read as an image ({reason}): replace or remove it"
        ) from error
