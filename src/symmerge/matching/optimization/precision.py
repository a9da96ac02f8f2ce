"""Lower precision on GPUs: bfloat16 autocast and TF32 matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def bfloat16_autocast(device: torch.device) -> torch.autocast:
    """Mixed precision on a GPU. Not on a CPU: bfloat16 matmuls crash Python on some."""
    return torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def tf32_matmuls(device: torch.device) -> Iterator[None]:
    """Float32 matmuls in TF32 on a GPU: ten bits of mantissa, for models that run in bfloat16."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    # torch 2.9 and newer have two settings and refuse to run where they disagree; the older one
    # sets both.
    precision = getattr(matmul, "fp32_precision", None)
    before = matmul.allow_tf32 if precision is None else precision == "tf32"
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = before
        if precision is not None:
            matmul.fp32_precision = precision
