"""The precision that weights are stored in, by name."""

from __future__ import annotations

from dataclasses import replace

import torch

from symmerge.checkpoints.weights import ConvertedWeights
from symmerge.errors import MismatchError
from symmerge.models.model import Model

STORED_DTYPES = ("float32", "float16", "bfloat16")
IN_CONFIG = ("dtype", "torch_dtype")  # the second as older versions of transformers write it


def dtype_name(dtype: torch.dtype) -> str:
    """A precision as configs name it: float32."""
    return str(dtype).removeprefix("torch.")


def check_dtype(name: str | None) -> None:
    """Refuse a precision that checkpoints are not stored in."""
    if name is not None and name not in STORED_DTYPES:
        *others, last = STORED_DTYPES
        raise MismatchError(f"--dtype {name}: choose {', '.join(others)} or {last}")


def to_dtype(model: Model, name: str | None) -> Model:
    """The model, to be stored in another precision; None leaves it as it is. Lazy.

    An alignment that was applied to it stays known, so the gate checks the rounded tensors.
    """
    check_dtype(name)
    if name is None:
        return model
    config = {key: value for key, value in model.config.items() if key not in IN_CONFIG}
    weights = ConvertedWeights(model.weights, getattr(torch, name))
    return replace(model, weights=weights, config={**config, "dtype": name})
