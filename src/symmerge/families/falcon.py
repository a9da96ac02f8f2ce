"""Falcon: fused QKV in three layouts, parallel or sequential blocks, rotary positions or slopes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import Reading
from symmerge.families.decoders import (
    GPT_HEADS,
    TASKS,
    decoder,
    gpt_last_norm,
    gpt_spaces,
    head_flags,
)
from symmerge.families.spaces import feed_forward
from symmerge.symmetry.groups import OrthogonalFixingOnes, RotaryPairs

# Each head (with its queries, if they share keys) has its three parts side by side. Where all
# queries share one key, that is a single head.
QKV = "(head.{i} ((query.{i} qk.{i}) + qk.{i}* + vo.{i}))"
TABLE = (
    """
transformer.word_embeddings.weight                 vocabulary   residual
transformer.h.{i}.input_layernorm.weight           residual~               if one_norm
transformer.h.{i}.input_layernorm.bias             residual                if one_norm
transformer.h.{i}.ln_attn.weight                   residual~               if two_norms
transformer.h.{i}.ln_attn.bias                     residual                if two_norms
transformer.h.{i}.self_attention.query_key_value.weight   QKV   residual*
transformer.h.{i}.self_attention.query_key_value.bias     QKV   if bias
transformer.h.{i}.self_attention.dense.weight      residual     (head.{i} query.{i} vo.{i}*)
transformer.h.{i}.self_attention.dense.bias        residual                if bias
transformer.h.{i}.post_attention_layernorm.weight  residual~               if sequential
transformer.h.{i}.post_attention_layernorm.bias    residual                if sequential
transformer.h.{i}.ln_mlp.weight                    residual~               if two_norms
transformer.h.{i}.ln_mlp.bias                      residual                if two_norms
transformer.h.{i}.mlp.dense_h_to_4h.weight         ff.{i}       residual*
transformer.h.{i}.mlp.dense_h_to_4h.bias           ff.{i}                  if bias
transformer.h.{i}.mlp.dense_4h_to_h.weight         residual     ff.{i}*
transformer.h.{i}.mlp.dense_4h_to_h.bias           residual                if bias
transformer.ln_f.weight                            residual~
transformer.ln_f.bias                              residual
""".replace("QKV", QKV)
    + GPT_HEADS
)
NORMS = """
transformer.h.{i}.input_layernorm -> transformer.h.{i}.self_attention.query_key_value if sequential
transformer.h.{i}.input_layernorm -> transformer.h.{i}.self_attention.query_key_value
    transformer.h.{i}.mlp.dense_h_to_4h  if shared_norm
transformer.h.{i}.post_attention_layernorm -> transformer.h.{i}.mlp.dense_h_to_4h  if sequential
transformer.h.{i}.ln_attn -> transformer.h.{i}.self_attention.query_key_value  if two_norms
transformer.h.{i}.ln_mlp  -> transformer.h.{i}.mlp.dense_h_to_4h  if two_norms
""" + gpt_last_norm("transformer.ln_f")


def read(config: Any, names: Collection[str]) -> Reading:
    width, heads = config.hidden_size, config.num_attention_heads
    size = width // heads
    if config.new_decoder_architecture:
        own_keys = config.num_kv_heads
    else:
        own_keys = 1 if config.multi_query else heads
    return Reading(
        layers=config.num_hidden_layers,
        spaces=gpt_spaces(
            config,
            stream=OrthogonalFixingOnes(width),
            qk=None if config.alibi else RotaryPairs(size, rotary=size),
            ff=feed_forward(config.activation, config.ffn_hidden_size),
            slopes=config.alibi,
            heads=own_keys,
        ),
        flags={**head_flags(config), **_norms(config), "bias": config.bias},
    )


def _norms(config: Any) -> dict[str, bool]:
    """Which norms a block has: one for both branches, one for each, or one after the other."""
    parallel, norms = config.parallel_attn, config.num_ln_in_parallel_attn
    if norms is None and config.new_decoder_architecture:
        norms = 2
    two = parallel and norms == 2
    return {
        "one_norm": not two,
        "two_norms": two,
        "shared_norm": parallel and not two,
        "sequential": not parallel,
    }


FAMILY = decoder(
    "falcon",
    ("Falcon",),
    TABLE,
    NORMS,
    read,
    labels=("Falcon" + end for end in TASKS),
    bare=("FalconModel",),
    base="transformer.",
    embedding="word_embeddings",
)
