"""Names of models for figures, tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from string import ascii_uppercase

MAX_PAIR_NAME = 32
MAX_NAME = 16  # characters of a name that fit beside a figure


def model_names(places: Sequence[str]) -> list[str]:
    """Names for figures: folder names, or numbers if those are long or not unique.

    >>> model_names(["zoo/seed-0", "zoo/seed-1"]), model_names(["a/best", "b/best"])
    (['seed-0', 'seed-1'], ['model 0', 'model 1'])
    """
    folders = [PurePath(place).name for place in places]
    distinct = len(set(folders)) == len(folders)
    if distinct and all(0 < len(folder) <= MAX_NAME for folder in folders):
        return folders
    return [f"model {number}" for number in range(len(places))]


def pair_names(places: Sequence[str]) -> list[str]:
    """Names of the models of a pair: folder names, with the folder above where they are equal.

    >>> pair_names(["zoo/seed-0", "zoo/seed-1"]), pair_names(["a/best", "org/best"])
    (['seed-0', 'seed-1'], ['a/best', 'org/best'])
    """
    for parts in (1, 2):
        names = ["/".join(PurePath(place).parts[-parts:]) for place in places]
        if len(set(names)) == len(names) and all(names):
            return [shortened(name) for name in names]
    return [f"model {letter}" for letter in ascii_uppercase[: len(places)]]


def shortened(name: str, most: int = MAX_PAIR_NAME) -> str:
    """A name cut in its middle: the end tells models of a series apart."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - half]}…{name[-half:]}"


def joined(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> joined(["a", "b", "c"]), joined(["a", "b"])
    ('a, b and c', 'a and b')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
