"""The one door to `from_pretrained`: nothing is fetched, and no code of a checkpoint is run."""

from __future__ import annotations

from os import PathLike
from typing import Any


def from_local(kind: Any, folder: str | PathLike[str] | None, **options: Any) -> Any:
    """`kind.from_pretrained` of a local folder, for classes and Auto classes of transformers.

    Left out, `trust_remote_code` makes transformers ask on the terminal; whoever types "y" runs
    the checkpoint's code. Here it is always False: such a checkpoint is an error.
    """
    assert folder is not None, "a model in memory has no folder"
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
