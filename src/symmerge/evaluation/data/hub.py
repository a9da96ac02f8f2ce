"""Hugging Face data sets: by name (`hf:NAME` or `hf:NAME:CONFIG`) or from a folder made by `save_to_disk`. `datasets` is optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from symmerge.errors import DataError

SPLITS = (
    "validation",
    "test",
    "train",
)  # the first that is there; the test sets of benchmarks often have no labels
OFFLINE = "make a copy on another machine with `datasets.load_dataset(NAME)[SPLIT].save_to_disk(FOLDER)`, and give FOLDER as the data"


def is_hub(data: str) -> bool:
    """Whether this names a Hugging Face data set or is a folder with one."""
    return data.startswith("hf:") or any(
        (Path(data) / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")
    )


def read_hub(data: str) -> Any:
    """One split of a data set: rows by index, columns by name."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"{data}: Hugging Face data sets need the package `datasets`: `pip install datasets`, or export the rows as TSV or JSONL"
        ) from error
    try:
        found = (
            _named(datasets, data.removeprefix("hf:"))
            if data.startswith("hf:")
            else datasets.load_from_disk(data)
        )
    except (
        Exception
    ) as error:  # a missing network, a wrong name and a damaged folder raise many kinds
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"{data} cannot be opened ({reason}): without network, {OFFLINE}"
        ) from error
    if isinstance(found, dict):
        split = next((name for name in SPLITS if name in found), None)
        if split is None:
            raise DataError(
                f"{data} has the splits {', '.join(found)}, none of {', '.join(SPLITS)}: save the one you want with save_to_disk and give its folder"
            )
        found = found[split]
    return found


def _named(datasets: Any, name: str) -> Any:
    name, _, config = name.partition(":")
    return datasets.load_dataset(name, config or None)
