"""Logits for stock classes without a head: the first coordinates of the pooled output."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def with_pooled_logits(module: Module, pooled: int | None) -> Module:
    """Let a module return `pooled` coordinates as logits; None: the class has its own head."""
    if pooled is not None:
        module.register_forward_hook(partial(_pooled_output, pooled))
    return module


def _pooled_output(pooled: int, module: nn.Module, inputs: Any, output: Any) -> Any:
    # slow to import, and only needed here
    from transformers.modeling_outputs import ImageClassifierOutput

    return ImageClassifierOutput(logits=output.pooler_output[:, :pooled])
