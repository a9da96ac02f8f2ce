"""StableLM: pre-LayerNorm, partial rotary positions, grouped heads, gated units."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import llama
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder, head_flags
from symmerge.families.spaces import (
    gated,
    rotary_size,
)
from symmerge.symmetry.groups import OrthogonalFixingOnes, RotaryPairs

TABLE = (
    """
model.embed_tokens.weight                         vocabulary   residual
model.layers.{i}.input_layernorm.weight           residual~
model.layers.{i}.input_layernorm.bias             residual
"""
    + llama.ATTENTION
    + """
model.layers.{i}.post_attention_layernorm.weight  residual~                    if sequential
model.layers.{i}.post_attention_layernorm.bias    residual                     if sequential
"""
    + llama.GATED
    + """
model.norm.weight                                 residual~
model.norm.bias                                   residual
"""
    + llama.HEADS
)

# In a parallel block one norm is read by attention and by the units.
NORMS = (
    """
model.layers.{i}.input_layernorm           -> model.layers.{i}.self_attn.q_proj
    model.layers.{i}.self_attn.k_proj model.layers.{i}.self_attn.v_proj  if sequential
model.layers.{i}.input_layernorm           -> model.layers.{i}.self_attn.q_proj
    model.layers.{i}.self_attn.k_proj model.layers.{i}.self_attn.v_proj
    model.layers.{i}.mlp.gate_proj model.layers.{i}.mlp.up_proj  if parallel
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate_proj
    model.layers.{i}.mlp.up_proj  if sequential
"""
    + llama.LAST_NORM
)


def read(config: Any, names: Collection[str]) -> Reading:
    if config.qk_layernorm:
        raise UnsupportedModel(
            "stablelm with qk_layernorm has a norm of its own for every head, which no table"
            " describes yet: use a model without it"
        )
    size = llama.head_size(config)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=llama.decoder_spaces(
            config,
            stream=OrthogonalFixingOnes(config.hidden_size),
            qk=RotaryPairs(size, rotary=rotary_size(config, size)),
            ff=gated(config.intermediate_size),
            label=config.num_labels,
        ),
        flags={
            **head_flags(config),
            "qkv_bias": config.use_qkv_bias,
            "o_bias": False,
            "mlp_bias": False,
            "parallel": config.use_parallel_residual,
            "sequential": not config.use_parallel_residual,
        },
    )


FAMILY = decoder(
    "stablelm",
    ("StableLm",),
    TABLE,
    NORMS,
    read,
    labels=("StableLmForSequenceClassification", "StableLmForTokenClassification"),
    bare=("StableLmModel",),
)
