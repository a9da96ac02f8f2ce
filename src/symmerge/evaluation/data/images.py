"""Pictures with labels: the embedded digits, .npz files, folders with a subfolder per class, or the hub."""

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

DIGITS = {
    "digits": "test",
    "digits:train": "train",
}  # the part to measure on, and what models were trained on: to calibrate with
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
ARRAYS = (("x", "y"), ("images", "labels"), ("pixel_values", "labels"), ("x_test", "y_test"))
COLUMNS = (("image", "label"), ("img", "label"), ("image", "fine_label"))


@dataclass(frozen=True)
class LabelledImages:
    """Pictures (a path, an 8-bit array or something PIL made) with the label of each: a number, or the name of a class.

    `ready`: they are arrays of floats that the model takes as they are, normalised already.
    """

    items: np.ndarray | Sequence[Any]
    labels: Sequence[Any]
    ready: bool = False


def read_images(data: str) -> LabelledImages:
    """Where the pictures are; files are opened later, as they are needed."""
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
        f"{data} holds no pictures: give digits, an .npz file, a folder with a subfolder per class, or a Hugging Face data set"
    )


def _from_hub(data: str) -> LabelledImages:
    found = read_hub(data)
    columns = next((names for names in COLUMNS if set(names) <= set(found.column_names)), None)
    if columns is None:
        raise DataError(
            f"{data} has no columns image and label; it has: {', '.join(found.column_names)}. Rename those you mean"
        )
    return LabelledImages(_Column(found, columns[0]), list(found[columns[1]]))


@dataclass(frozen=True)
class _Column(Sequence[Any]):
    """One column of a data set, row by row: the whole column would decode every picture."""

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
    found = [
        (file, one.name)
        for one in classes
        for file in sorted(one.iterdir())
        if file.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise DataError(
            f"{folder} has no pictures in subfolders: make one subfolder per class and put {', '.join(SUFFIXES[:3])} files in it"
        )
    return LabelledImages([file for file, _ in found], [label for _, label in found])


def _from_arrays(data: str) -> LabelledImages:
    try:
        with np.load(data, allow_pickle=False) as file:
            names = next((pair for pair in ARRAYS if set(pair) <= set(file.files)), None)
            if names is None:
                known = " or ".join("/".join(pair) for pair in ARRAYS)
                raise DataError(
                    f"{data} has the arrays {', '.join(file.files) or 'none'}; needed are {known}"
                )
            images, labels = (file[name] for name in names)
    except FileNotFoundError as error:
        raise DataError(
            f"{data} is not there: give digits, hf:NAME, or a file or folder that exists"
        ) from error
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(
            f"{data} is not an .npz file that can be read without running code ({error}): write it with numpy.savez"
        ) from error
    if len(images) != len(labels) or images.ndim not in (3, 4) or labels.ndim != 1:
        raise DataError(
            f"{data}: pictures {list(images.shape)} and labels {list(labels.shape)} do not belong together: one label per picture, [n, h, w, c]"
        )
    ready = np.issubdtype(images.dtype, np.floating)
    if not ready and images.dtype != np.uint8:
        raise DataError(
            f"{data}: pictures are {images.dtype}: store them as uint8 [n, h, w, c], or as floats [n, c, h, w] normalised for the model"
        )
    return LabelledImages(images, labels.tolist(), ready)


def decode_image(item: Any, channels: int) -> np.ndarray:
    """One picture as 8-bit numbers, channels first."""
    from PIL import Image

    with _readable(item):
        if isinstance(item, np.ndarray):
            item = Image.fromarray(item[..., 0] if item.shape[2:] == (1,) else item)
        picture = Image.open(item) if isinstance(item, Path) else item
        array = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def check_file(path: Path) -> None:
    """Refuse a file that is no picture before anything is computed; its first bytes tell."""
    from PIL import Image

    with _readable(path):
        Image.open(path).close()


@contextmanager
def _readable(item: Any) -> Iterator[None]:
    try:
        yield
    except (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
    ) as error:  # what PIL raises for damaged files
        what = str(item) if isinstance(item, Path) else "a picture of the data"
        raise DataError(
            f"{what} cannot be read as a picture ({' '.join(str(error).split())[:120]}): replace or remove it"
        ) from error
