"""Hugging Face data sets, by name (`hf:NAME[:CONFIG]`) or from a folder made by `save_to_disk`.

The package `datasets` is optional.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from symmerge.errors import DataError

# The first one that exists is taken; test splits of benchmarks often have no labels.
SPLITS = ("validation", "test", "train")
OFFLINE = (
    "copy it on another machine with `datasets.load_dataset(NAME)[SPLIT].save_to_disk(FOLDER)`,"
    " and give FOLDER as the data"
)


def is_hub(data: str) -> bool:
    """Whether this is the name or the folder of a Hugging Face data set."""
    files = ("dataset_info.json", "dataset_dict.json")
    return data.startswith("hf:") or any(os.path.isfile(Path(data) / name) for name in files)


def read_hub(data: str) -> Any:
    """One split of a data set: rows by index, columns by name."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"{data}: Hugging Face data sets need the package `datasets`:"
            " `pip install datasets`, or export the rows as TSV or JSONL"
        ) from error
    try:
        content = _open(datasets, data)
    except Exception as error:  # no network, a wrong name or a damaged folder raise many kinds
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"{data} cannot be opened ({reason}): without network, {OFFLINE}"
        ) from error
    return _one_split(content, data) if isinstance(content, dict) else content


def _open(datasets: Any, data: str) -> Any:
    if not data.startswith("hf:"):
        return datasets.load_from_disk(data)
    name, _, config = data.removeprefix("hf:").partition(":")
    return datasets.load_dataset(name, config or None)


def _one_split(splits: dict[str, Any], data: str) -> Any:
    for name in SPLITS:
        if name in splits:
            return splits[name]
    raise DataError(
        f"{data} has the splits {', '.join(splits)}, none of {', '.join(SPLITS)}:"
        " save the one you want with save_to_disk and give its folder"
    )
