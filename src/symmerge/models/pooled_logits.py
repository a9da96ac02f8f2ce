"""Every model answers with logits: one whose stock class has no head, with the first coordinates of what it pools."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def with_pooled_logits(module: Module, pooled: int | None) -> Module:
    """The module itself; `pooled` is how many coordinates count, None where the class has a head (`Spec.pooled`)."""
    if pooled is not None:
        module.register_forward_hook(partial(_answer, pooled))
    return module


def _answer(pooled: int, module: nn.Module, inputs: Any, output: Any) -> Any:
    from transformers.modeling_outputs import (
        ImageClassifierOutput,  # slow to import, and only needed here
    )

    return ImageClassifierOutput(logits=output.pooler_output[:, :pooled])
