"""Small encoder-decoders of every family, for `small_models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
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

_BART: dict[str, object] = {
    "vocab_size": 101,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 40,
}

_WHISPER: dict[str, object] = {
    **{key: value for key, value in _BART.items() if key != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 24,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": (2, 3),
}

SEQ2SEQ: dict[str, tuple[str, dict[str, object]]] = {
    "t5": ("T5ForConditionalGeneration", _T5),
    # as v1.1: gated, and with a head of its own; the stacks differ in depth
    "t5-gated": ("T5ForConditionalGeneration", {**_GATED, "num_decoder_layers": 3}),
    "bart": ("BartForConditionalGeneration", _BART),
    "bart-untied": (
        "BartForConditionalGeneration",
        {**_BART, "tie_word_embeddings": False, "activation_function": "relu", "decoder_layers": 3},
    ),
    "t5-classifier": (
        "T5ForSequenceClassification",
        {**_T5, "num_decoder_layers": 3, "num_labels": 3, "eos_token_id": 1},
    ),
    "t5-tokens": ("T5ForTokenClassification", {**_GATED, "num_labels": 3}),
    "bart-decoder": ("BartForCausalLM", _BART),
    "whisper-decoder": ("WhisperForCausalLM", {**_WHISPER, "tie_word_embeddings": False}),
    "whisper-classifier": (
        "WhisperForAudioClassification",
        {**_WHISPER, "num_labels": 3, "classifier_proj_size": 16, "use_weighted_layer_sum": True},
    ),
    "bart-classifier": ("BartForSequenceClassification", {**_BART, "num_labels": 3}),
    "mbart": ("MBartForConditionalGeneration", {**_BART, "scale_embedding": True}),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
    "whisper-untied": (
        "WhisperForConditionalGeneration",
        {**_WHISPER, "tie_word_embeddings": False, "activation_function": "relu"},
    ),
    "umt5": ("UMT5ForConditionalGeneration", {**_GATED, "d_kv": 12}),
}
_OWN_HEAD = ("t5-gated", "umt5")


@torch.no_grad()
def finish(name: str, model: PreTrainedModel, seed: int) -> None:
    """What a config cannot ask for: T5 is built with a tied head, and some biases are zero."""
    head: Any = model.get_output_embeddings()
    if name in _OWN_HEAD and head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())
    for key, buffer in model.named_buffers():
        if key.endswith(("final_logits_bias", "e_score_correction_bias")):
            buffer.normal_(generator=torch.Generator().manual_seed(seed))
