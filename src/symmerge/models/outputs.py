"""Logits of stock classes that call their answer otherwise: features, starts and ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from symmerge.symmetry.spec import Spec

Module = TypeVar("Module", bound=nn.Module)
Logits = dict[str, torch.Tensor]


def with_logits(module: Module, spec: Spec | None) -> Module:
    """Let a module return what its class computes as logits; None: it has no table."""
    read = spec and _reader(spec)
    if read:
        module.register_forward_hook(partial(_returned, read))
    return module


def _reader(spec: Spec) -> Callable[[Any], Logits] | None:
    if spec.pooled is not None:
        return lambda output: {"logits": output.pooler_output[:, : spec.pooled]}
    if spec.task in ANSWERS:
        return ANSWERS[spec.task]
    return _features if spec.shows_stream else None


def _of_pairs(output: Any) -> Logits:
    """The scores of every image for every text."""
    return {"logits": output.logits_per_image}


def _of_texts(output: Any) -> Logits:
    return {"logits": output.text_embeds}


def _of_images(output: Any) -> Logits:
    return {"logits": output.image_embeds}


def _starts_and_ends(output: Any) -> Logits:
    """Two scores for each token; a softmax over the tokens reads them, not over the two."""
    return {"logits": torch.stack([output.start_logits, output.end_logits], -1)}


ANSWERS: dict[str, Callable[[Any], Logits]] = {
    "question-answering": _starts_and_ends,
    "image-text": _of_pairs,
    "text-embedding": _of_texts,
    "image-embedding": _of_images,
}
"""Task of a head -> its answer, where the stock class does not call it logits."""


def _features(output: Any) -> Logits:
    """The stream, of both stacks if there are two, and what is pooled of it, if anything is."""
    pooled, encoded = output.get("pooler_output"), output.get("encoder_last_hidden_state")
    seen = {"logits": output.last_hidden_state}
    seen |= {} if encoded is None else {"encoder_logits": encoded}
    return seen if pooled is None else {**seen, "pooled_logits": pooled}


def _returned(read: Callable[[Any], Logits], module: nn.Module, inputs: Any, output: Any) -> Any:
    # slow to import, and only needed here
    from transformers.utils.generic import ModelOutput

    return ModelOutput(read(output))
