"""Small encoder-decoders of every family, for `small_models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_T5: dict[str, object] = {
    "vocab_size": 101,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}
_GATED: dict[str, object] = {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

SEQ2SEQ: dict[str, tuple[str, dict[str, object]]] = {
    "t5": ("T5ForConditionalGeneration", _T5),
    # as v1.1: gated, and with a head of its own; the stacks differ in depth
    "t5-gated": ("T5ForConditionalGeneration", {**_GATED, "num_decoder_layers": 3}),
    "umt5": ("UMT5ForConditionalGeneration", {**_GATED, "d_kv": 12}),
}
_OWN_HEAD = ("t5-gated", "umt5")


def own_head(name: str, model: PreTrainedModel) -> None:
    """Give a model the head of its own that its config cannot ask for: T5 is built tied."""
    head: Any = model.get_output_embeddings()
    if name in _OWN_HEAD and head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())
