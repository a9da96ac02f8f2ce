"""Models by their name on the Hugging Face hub. The only place that fetches anything."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from symmerge.checkpoints.reading import NOT_A_FOLDER, TOKENIZER_FILES
from symmerge.errors import CheckpointError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CARD = "README.md"  # it names the licence
SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
OFFLINE = "HF_HUB_OFFLINE"  # read by huggingface_hub
USER_OFFLINE = "SYMMERGE_OFFLINE"  # what the user had set before the command line set OFFLINE
TRUE = {"1", "ON", "YES", "TRUE"}  # as the hub reads it


def local_folder(name: str) -> Path:
    """The folder of a checkpoint: `name` itself, or a download if it looks like `owner/name`.

    Config, weights and tokenizer are downloaded once, into the hub's cache. With HF_HUB_OFFLINE=1
    only the cache is used.
    """
    path = Path(name)
    if os.path.isdir(path):
        return path.absolute()
    if os.path.exists(path) or not is_hub_name(name):
        raise CheckpointError(f"{name} {NOT_A_FOLDER}")
    try:
        return _fetch(name)
    except Exception as error:  # network, name, permission, disk space: each raises its own type
        reason = " ".join(str(error).split())[:160]
        if _offline():
            reason = f"it was not fetched before, and {OFFLINE} is set; unset it"
        raise CheckpointError(
            f"{name} is not a folder here and cannot be fetched from the hub ({reason}): check the"
            f" name, or run `hf download {name} --local-dir DIR` with a network, and give DIR"
        ) from error


def is_hub_name(text: str) -> bool:
    """Whether this looks like a name on the hub.

    If the parent folder exists, it is taken for a mistyped path.
    """
    return bool(NAME.fullmatch(text)) and not os.path.isdir(Path(text).parent)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    def fetch(weights: tuple[str, ...]) -> Path:
        patterns = ["config.json", CARD, *TOKENIZER_FILES, *weights]
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=_offline()))

    with _online_as_set_by_the_user():
        folder = fetch(SAFETENSORS)
        return folder if any(folder.glob(SAFETENSORS[0])) else fetch(PICKLES)


def _offline() -> bool:
    return os.environ.get(USER_OFFLINE, os.environ.get(OFFLINE, "")).upper() in TRUE


@contextmanager
def _online_as_set_by_the_user() -> Iterator[None]:
    """Apply the user's offline setting: huggingface_hub read OFFLINE when it was imported."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = _offline()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
