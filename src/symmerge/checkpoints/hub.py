"""A model by its name on the Hugging Face hub: fetched once into the hub's own cache. The only place that ever fetches anything."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from symmerge.checkpoints.reading import READERS
from symmerge.errors import CheckpointError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SAFETENSORS, PICKLES = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)
OFFLINE, SAID = (
    "HF_HUB_OFFLINE",
    "SYMMERGE_OFFLINE",
)  # what the hub goes by, and what the user said before the command line (cli/__init__.py) set it
TRUE = {"1", "ON", "YES", "TRUE"}  # as the hub reads it


def local_folder(name: str) -> Path:
    """The folder of a checkpoint: as it is, or fetched where it is no folder and looks like `owner/name`.

    Offline (HF_HUB_OFFLINE=1) only what was fetched before is found. Of the files only config, weights and what reads inputs come.
    """
    path = Path(name)
    if path.exists() or not is_name(name):
        if not path.is_dir():
            raise CheckpointError(
                f"{name} is not a folder: give a checkpoint folder, or a name on the hub (owner/name)"
            )
        return path.absolute()
    try:
        return _fetched(name)
    except (
        Exception
    ) as error:  # no network, no such name, no permission, no room: each raises its own kind
        offline = (
            f"it was not fetched before, and {OFFLINE} is set; unset it"
            if _offline()
            else " ".join(str(error).split())[:160]
        )
        raise CheckpointError(
            f"{name} is no folder here, and the hub does not give it ({offline}): check the name, or where there is a network"
            f" `hf download {name} --local-dir DIR`, and give DIR"
        ) from error


def is_name(text: str) -> bool:
    """Whether this is written like a name on the hub. A path whose parent folder is here is a path with a slip in it."""
    return bool(NAME.fullmatch(text)) and not Path(text).parent.is_dir()


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    def some(weights: tuple[str, ...]) -> Path:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["config.json", *READERS, *weights],
                local_files_only=_offline(),
            )
        )

    with _online():
        folder = some(SAFETENSORS)
        return folder if any(folder.glob(SAFETENSORS[0])) else some(PICKLES)


def _offline() -> bool:
    return os.environ.get(SAID, os.environ.get(OFFLINE, "")).upper() in TRUE


@contextmanager
def _online() -> Iterator[None]:
    """The hub decided when it was imported, by what the command line had set: for this one call, as the user said."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = _offline()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
