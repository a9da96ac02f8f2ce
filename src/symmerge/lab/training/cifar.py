"""CIFAR-10 and CIFAR-100 from their published folders, as torchvision reads them.

torchvision itself is no option: PyPI's build is for CUDA, and with a CPU build of torch its import
fails (0.28.0 with torch 2.13.0+cpu: "operator torchvision::nms does not exist"). The library
`datasets` reads these sets only from the hub.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from symmerge.errors import DataError

# MD5 of the published files. Pickles can run code, so only these are unpickled.
MD5: dict[str, dict[str, str]] = {
    "cifar-10-batches-py": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    "cifar-100-python": {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
}
LABELS: Mapping[str, str] = {"cifar-10-batches-py": "labels", "cifar-100-python": "fine_labels"}


def read_cifar(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] and labels of `train` or `test`."""
    names = [name for name in MD5[folder.name] if ("test" in name) == (split == "test")]
    batches = [_unpickle(folder / name, MD5[folder.name][name]) for name in names]
    rows = np.concatenate([batch["data"] for batch in batches])
    labels = np.concatenate([batch[LABELS[folder.name]] for batch in batches])
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _unpickle(file: Path, md5: str) -> dict[str, Any]:
    if not file.exists():
        raise DataError(f"{file} is missing: unpack the whole archive again")
    content = file.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise DataError(
            f"{file} is not the published file (its MD5 differs), and other pickles may run code:"
            " unpack the archive again, or give plain arrays as .npz"
        )
    return pickle.loads(content, encoding="latin1")
