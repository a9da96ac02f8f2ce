"""Phi-3 and Phi-4: Llama with fused QKV, fused gate and up branches, partial rotary."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families import llama
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder, head_flags
from symmerge.families.spaces import (
    gated,
    rotary_size,
)
from symmerge.symmetry.groups import Orthogonal, RotaryPairs

TABLE = (
    """
model.embed_tokens.weight                         vocabulary   residual
model.layers.{i}.input_layernorm.weight           residual~
model.layers.{i}.self_attn.qkv_proj.weight
    ((head.{i} query.{i} qk.{i}) + (head.{i} qk.{i}*) + (head.{i} vo.{i}))  residual*
model.layers.{i}.self_attn.o_proj.weight          residual     (head.{i} query.{i} vo.{i}*)
model.layers.{i}.post_attention_layernorm.weight  residual~
model.layers.{i}.mlp.gate_up_proj.weight          (ff.{i}~ + ff.{i})  residual*
model.layers.{i}.mlp.down_proj.weight             residual     ff.{i}*
model.norm.weight                                 residual~
"""
    + llama.HEADS
)

NORMS = (
    """
model.layers.{i}.input_layernorm           -> model.layers.{i}.self_attn.qkv_proj
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate_up_proj
"""
    + llama.LAST_NORM
)


def read(config: Any, names: Collection[str]) -> Reading:
    size = llama.head_size(config)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=llama.decoder_spaces(
            config,
            stream=Orthogonal(config.hidden_size),
            qk=RotaryPairs(size, rotary=rotary_size(config, size)),
            ff=gated(config.intermediate_size),
            label=config.num_labels,
        ),
        flags=head_flags(config),
    )


FAMILY = decoder(
    "phi3",
    ("Phi3",),
    TABLE,
    NORMS,
    read,
    labels=("Phi3ForSequenceClassification", "Phi3ForTokenClassification"),
    bare=("Phi3Model",),
)
