"""Data that comes with the installation: scikit-learn's digits and Python's documentation."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

SPLITS = ("train", "test")
TOPICS = 4  # the longest ones
CODE_FILES = 60  # about a megabyte, twice the documentation
MAX_CHARACTERS = 46  # of a piece of text: fits 48 positions, whatever the tokenizer


def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 8, 8] in [0, 1] as float32, and their labels; one fifth is the test split.

    >>> images, labels = digits("test")
    >>> images.shape, labels.shape
    ((360, 8, 8), (360,))
    """
    assert split in SPLITS, split
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    data: Any = load_digits()
    # The file is sorted by writer and cycles through 0 to 9, so neither its end nor every fifth
    # image is a fair test. RandomState is frozen: its order never changes between versions.
    order = np.random.RandomState(0).permutation(len(data.target))
    tests = len(order) // 5 + 1
    rows = order[:tests] if split == "test" else order[tests:]
    return (data.images[rows] / 16).astype(np.float32), data.target[rows].astype(np.int64)


def python_docs(split: str) -> str:
    """All topics of Python's `help()`; the last tenth is the test split.

    Depends on Python's version.
    """
    assert split in SPLITS, split
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    cut = len(text) * 9 // 10
    return text[:cut] if split == "train" else text[cut:]


def python_code(split: str) -> str:
    """Sources of Python's library; the last tenth is the test split.

    Depends on Python's version.
    """
    assert split in SPLITS, split
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:CODE_FILES]
    text = "\n".join(file.read_text("utf-8", "ignore") for file in files)
    cut = len(text) * 9 // 10
    return text[:cut] if split == "train" else text[cut:]


def python_topics(split: str) -> list[tuple[int, str]]:
    """Pieces of the longest topics of Python's `help()`, with topic; every fifth is for testing.

    Depends on Python's version.

    >>> rows = python_topics("test")
    >>> sorted({topic for topic, _ in rows}), max(len(text) for _, text in rows) <= MAX_CHARACTERS
    ([0, 1, 2, 3], True)
    """
    assert split in SPLITS, split
    from pydoc_data.topics import topics

    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[:TOPICS]
    rows = [
        (topic, piece)
        for topic, name in enumerate(sorted(longest))
        for piece in _pieces(topics[name])
    ]
    return [row for number, row in enumerate(rows) if (number % 5 == 0) == (split == "test")]


def _pieces(text: str) -> list[str]:
    """Split a text at spaces into pieces of at most MAX_CHARACTERS; ASCII only, no longer words."""
    pieces = [""]
    for word in text.encode("ascii", "ignore").decode().split():
        longer = f"{pieces[-1]} {word}".strip()
        if len(longer) <= MAX_CHARACTERS:
            pieces[-1] = longer
        elif len(word) <= MAX_CHARACTERS:
            pieces.append(word)
    return pieces
