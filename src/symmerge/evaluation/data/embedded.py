"""Data that comes with the installation: handwritten digits from scikit-learn, and Python's own documentation."""

from __future__ import annotations

from typing import Any

import numpy as np

SPLITS = ("train", "test")
TOPICS, PIECE = (
    4,
    46,
)  # the longest ones, and letters of a piece of text: a model with 48 positions takes it, whatever its tokens


def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 8, 8] from 0 to 1 in float32, and which digit each is; four fifths to train, one fifth to test.

    >>> images, labels = digits("test")
    >>> images.shape, labels.shape
    ((360, 8, 8), (360,))
    """
    assert split in SPLITS, split
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    found: Any = load_digits()
    # The file goes by writer and counts from 0 to 9, so neither its end nor every fifth image is a fair test. The stream of
    # RandomState is frozen: this order is the same everywhere and for ever.
    order = np.random.RandomState(0).permutation(len(found.target))
    tests = len(order) // 5 + 1
    chosen = order[:tests] if split == "test" else order[tests:]
    return (found.images[chosen] / 16).astype(np.float32), found.target[chosen].astype(np.int64)


def python_docs(split: str) -> str:
    """The topics of Python's `help()`, one after the other: the first nine tenths to train, the rest to test. Depends on Python's version."""
    assert split in SPLITS, split
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    cut = len(text) * 9 // 10
    return text[:cut] if split == "train" else text[cut:]


def python_topics(split: str) -> list[tuple[int, str]]:
    """Pieces of the longest topics of Python's `help()`, and which topic each is from; every fifth is to test. Depends on Python's version.

    >>> rows = python_topics("test")
    >>> sorted({topic for topic, _ in rows}), max(len(text) for _, text in rows) <= PIECE
    ([0, 1, 2, 3], True)
    """
    assert split in SPLITS, split
    from pydoc_data.topics import topics

    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[:TOPICS]
    pieces = [
        (number, piece)
        for number, name in enumerate(sorted(longest))
        for piece in _pieces(topics[name])
    ]
    return [piece for at, piece in enumerate(pieces) if (at % 5 == 0) == (split == "test")]


def _pieces(text: str) -> list[str]:
    """A text cut between words, each piece as long as it may be; longer words are left out, and so is what has no bytes of its own."""
    pieces = [""]
    for word in text.encode("ascii", "ignore").decode().split():
        longer = f"{pieces[-1]} {word}".strip()
        if len(longer) <= PIECE:
            pieces[-1] = longer
        elif len(word) <= PIECE:
            pieces.append(word)
    return pieces
