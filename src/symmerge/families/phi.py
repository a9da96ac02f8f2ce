"""Phi 1 and 2: parallel blocks that share one LayerNorm, partial rotary positions, biases."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import llama
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder, head_flags
from symmerge.families.spaces import (
    feed_forward,
    rotary_size,
)
from symmerge.symmetry.groups import OrthogonalFixingOnes, RotaryPairs

TABLE = (
    """
model.embed_tokens.weight               vocabulary   residual
model.layers.{i}.input_layernorm.weight residual~
model.layers.{i}.input_layernorm.bias   residual
"""
    + llama.ATTENTION.replace("o_proj", "dense")
    + """
model.layers.{i}.mlp.fc1.weight         ff.{i}       residual*
model.layers.{i}.mlp.fc1.bias           ff.{i}
model.layers.{i}.mlp.fc2.weight         residual     ff.{i}*
model.layers.{i}.mlp.fc2.bias           residual
model.final_layernorm.weight            residual~
model.final_layernorm.bias              residual
lm_head.bias                            vocabulary   if lm
"""
    + llama.HEADS
)
NORMS = """
model.layers.{i}.input_layernorm  -> model.layers.{i}.self_attn.q_proj
    model.layers.{i}.self_attn.k_proj model.layers.{i}.self_attn.v_proj model.layers.{i}.mlp.fc1
""" + llama.LAST_NORM.replace("model.norm", "model.final_layernorm")


def read(config: Any, names: Collection[str]) -> Reading:
    if config.qk_layernorm:
        raise UnsupportedModel(
            "phi with qk_layernorm has norms of queries and keys, which no table describes yet:"
            " use a model without it"
        )
    size = config.hidden_size // config.num_attention_heads
    return Reading(
        layers=config.num_hidden_layers,
        spaces=llama.decoder_spaces(
            config,
            stream=OrthogonalFixingOnes(config.hidden_size),
            qk=RotaryPairs(size, rotary=rotary_size(config, size)),
            ff=feed_forward(config.hidden_act, config.intermediate_size),
            label=config.num_labels,
        ),
        flags={**head_flags(config), "qkv_bias": True, "o_bias": True},
    )


FAMILY = decoder(
    "phi",
    ("Phi",),
    TABLE,
    NORMS,
    read,
    labels=("PhiForSequenceClassification", "PhiForTokenClassification"),
    bare=("PhiModel",),
)
