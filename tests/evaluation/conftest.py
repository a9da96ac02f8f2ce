"""Checkpoints and files that tests of tasks and data share."""

from functools import cache

import numpy as np
import pytest
from fixtures import checkpoint
from PIL import Image
from task_data import ROWS, TEXT

from symmerge.models.model import load


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(name, seed=0, **changes):
        folder = root / "-".join([name, str(seed), *map(str, changes.values())])
        return load(checkpoint(folder, name, seed=seed, **changes))

    return make


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "rows.tsv"
    file.write_text("".join(f"{label}\t{text}\n" for label, text in ROWS))
    return file


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def pictures(tmp_path):
    """The same twenty images as an array and as files in folders."""
    images = np.random.RandomState(0).randint(0, 256, (20, 16, 16, 3), np.uint8)
    labels = np.arange(20) % 5
    np.savez(tmp_path / "pictures.npz", x=images, y=labels)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "folder" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "folder" / str(label) / f"{number:02}.png")
    return tmp_path
