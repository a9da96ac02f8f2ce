"""Llama, Mistral, Qwen2 and Granite: pre-RMSNorm, rotary positions, grouped heads, gated units."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import Reading
from symmerge.families.decoders import ANSWERS, CLASSIFIER, TOKENS, decoder, head_flags
from symmerge.families.spaces import (
    attention,
    gated,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, Group, Orthogonal, RotaryPairs
from symmerge.symmetry.spec import Space

# Parts that other decoders share.
ATTENTION = """
model.layers.{i}.self_attn.q_proj.weight          (head.{i} query.{i} qk.{i})  residual*
model.layers.{i}.self_attn.q_proj.bias            (head.{i} query.{i} qk.{i})  if qkv_bias
model.layers.{i}.self_attn.k_proj.weight          (head.{i} qk.{i}*)  residual*
model.layers.{i}.self_attn.k_proj.bias            (head.{i} qk.{i}*)           if qkv_bias
model.layers.{i}.self_attn.v_proj.weight          (head.{i} vo.{i})   residual*
model.layers.{i}.self_attn.v_proj.bias            (head.{i} vo.{i})            if qkv_bias
model.layers.{i}.self_attn.o_proj.weight          residual     (head.{i} query.{i} vo.{i}*)
model.layers.{i}.self_attn.o_proj.bias            residual                     if o_bias
"""
GATED = """
model.layers.{i}.mlp.gate_proj.weight             ff.{i}~      residual*
model.layers.{i}.mlp.gate_proj.bias               ff.{i}~                      if mlp_bias
model.layers.{i}.mlp.up_proj.weight               ff.{i}       residual*
model.layers.{i}.mlp.up_proj.bias                 ff.{i}                       if mlp_bias
model.layers.{i}.mlp.down_proj.weight             residual     ff.{i}*
model.layers.{i}.mlp.down_proj.bias               residual                     if mlp_bias
"""
HEADS = """
lm_head.weight                                    vocabulary   residual*       if untied
score.weight                                      label        residual*       if classifier
score.bias                                        label                        if tokens
qa_outputs.weight                                 answer       residual*       if answers
qa_outputs.bias                                   answer                       if answers
"""
LAST_NORM = """
model.norm                                 -> lm_head           if lm
model.norm                                 -> score             if classifier
model.norm                                 -> qa_outputs        if answers
"""
TABLE = (
    """
model.embed_tokens.weight                         vocabulary   residual
model.layers.{i}.input_layernorm.weight           residual~
"""
    + ATTENTION
    + """
model.layers.{i}.post_attention_layernorm.weight  residual~
"""
    + GATED
    + """
model.norm.weight                                 residual~
"""
    + HEADS
)

NORMS = (
    """
model.layers.{i}.input_layernorm           -> model.layers.{i}.self_attn.q_proj
    model.layers.{i}.self_attn.k_proj model.layers.{i}.self_attn.v_proj
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate_proj
    model.layers.{i}.mlp.up_proj
"""
    + LAST_NORM
)


def head_size(config: Any) -> int:
    """Coordinates of a head: a setting of its own, or a share of the stream."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def decoder_spaces(
    config: Any, *, stream: Group, qk: Group, ff: Group, **shown: int
) -> tuple[Space, ...]:
    """The spaces of a decoder with grouped heads; `shown` are more that can be seen."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    vo = GeneralLinear(head_size(config))
    return (
        *visible(vocabulary=config.vocab_size, answer=2, **shown),
        Space("residual", stream),
        *attention(heads=kv_heads, queries=heads // kv_heads, qk=qk, vo=vo),
        Space("ff.{i}", ff),
    )


def read(config: Any, names: Collection[str]) -> Reading:
    attention_bias = getattr(config, "attention_bias", False)
    size = head_size(config)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=decoder_spaces(
            config,
            stream=Orthogonal(config.hidden_size),
            qk=RotaryPairs(size, rotary=size),
            ff=gated(config.intermediate_size),
            label=config.num_labels,
        ),
        flags={
            **head_flags(config),
            "qkv_bias": config.model_type == "qwen2" or attention_bias,
            "o_bias": attention_bias,
            "mlp_bias": getattr(config, "mlp_bias", False),
        },
    )


FAMILY = decoder(
    "llama",
    ("Llama", "Mistral", "Qwen2", "Granite"),
    TABLE,
    NORMS,
    read,
    # Granite multiplies embeddings, branches, scores and logits by numbers: no group changes.
    types=("llama", "mistral", "qwen2", "granite"),
    labels=(
        *(name + end for name in ("Llama", "Mistral", "Qwen2") for end in (CLASSIFIER, TOKENS)),
        "Mistral" + ANSWERS,
    ),
    renamed=("Llama" + ANSWERS, "Qwen2" + ANSWERS),
    bare=("LlamaModel", "MistralModel", "Qwen2Model", "GraniteModel"),
)
