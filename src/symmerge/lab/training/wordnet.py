"""A folder tree of JPEGs whose classes are numbers of WordNet, as Tiny ImageNet is published."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from symmerge.errors import DataError
from symmerge.evaluation.data.images import decode_image
from symmerge.lab.training.cache import with_progress

PICTURES = ("*.JPEG", "*.jpeg", "*.jpg", "*.JPG")


def read_tree(root: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures, grey ones in colours, and their classes: places in the sorted numbers of WordNet. Its test part has no labels: `test` is its `val`."""
    numbers = sorted(path.name for path in _there(root / "train").iterdir() if path.is_dir())
    rows = _train(root, numbers) if part == "train" else _val(root, numbers)
    if not rows:
        raise DataError(
            f"{root} has no pictures of its {part} part: unpack the whole archive again"
        )
    found = [
        decode_image(file, 3).transpose(1, 2, 0)
        for file, _ in with_progress(rows, f"{root.name}, {part} part")
    ]
    sizes = {picture.shape for picture in found}
    if len(sizes) > 1:
        odd = next(
            file
            for (file, _), picture in zip(rows, found, strict=True)
            if picture.shape != found[0].shape
        )
        raise DataError(f"{odd} is of another size than {rows[0][0]}: is it part of the data set?")
    return np.stack(found), np.array([number for _, number in rows], np.int64)


def _train(root: Path, numbers: list[str]) -> list[tuple[Path, int]]:
    folders = [_there(root / "train" / number / "images") for number in numbers]
    return [
        (file, at)
        for at, folder in enumerate(folders)
        for file in sorted({file for kind in PICTURES for file in folder.glob(kind)})
    ]


def _val(root: Path, numbers: list[str]) -> list[tuple[Path, int]]:
    """In the order of the table, whose lines are a file, its class, and a box, with tabs between."""
    table, at, rows = (
        _there(root / "val" / "val_annotations.txt"),
        {number: place for place, number in enumerate(numbers)},
        [],
    )
    for line, content in enumerate(table.read_text("utf-8").splitlines(), 1):
        file, number = [*content.split("\t"), ""][:2]
        if number not in at:
            raise DataError(
                f"{table}, line {line}: {number or content!r} is no class of the training part: unpack the whole archive again"
            )
        rows.append((_there(root / "val" / "images" / file), at[number]))
    return rows


def _there(path: Path) -> Path:
    if not path.exists():
        raise DataError(
            f"{path} is missing: unpack the whole archive again, and leave its folders as they are"
        )
    return path
