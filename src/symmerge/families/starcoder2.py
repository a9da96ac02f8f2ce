"""StarCoder2: pre-LayerNorm, rotary positions, grouped heads, plain hidden units, biases."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families import llama
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder, head_flags
from symmerge.families.spaces import feed_forward
from symmerge.symmetry.groups import OrthogonalFixingOnes, RotaryPairs

TABLE = (
    """
model.embed_tokens.weight                         vocabulary   residual
model.layers.{i}.input_layernorm.weight           residual~
model.layers.{i}.input_layernorm.bias             residual
"""
    + llama.ATTENTION
    + """
model.layers.{i}.post_attention_layernorm.weight  residual~
model.layers.{i}.post_attention_layernorm.bias    residual
model.layers.{i}.mlp.c_fc.weight                  ff.{i}       residual*
model.layers.{i}.mlp.c_fc.bias                    ff.{i}                       if mlp_bias
model.layers.{i}.mlp.c_proj.weight                residual     ff.{i}*
model.layers.{i}.mlp.c_proj.bias                  residual                     if mlp_bias
model.norm.weight                                 residual~
model.norm.bias                                   residual
"""
    + llama.HEADS
)

NORMS = (
    """
model.layers.{i}.input_layernorm           -> model.layers.{i}.self_attn.q_proj
    model.layers.{i}.self_attn.k_proj model.layers.{i}.self_attn.v_proj
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.c_fc
"""
    + llama.LAST_NORM
)


def read(config: Any, names: Collection[str]) -> Reading:
    size = llama.head_size(config)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=llama.decoder_spaces(
            config,
            stream=OrthogonalFixingOnes(config.hidden_size),
            qk=RotaryPairs(size, rotary=size),
            ff=feed_forward(config.hidden_act, config.intermediate_size),
            label=config.num_labels,
        ),
        flags={
            **head_flags(config),
            **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), config.use_bias),
        },
    )


FAMILY = decoder(
    "starcoder2",
    ("Starcoder2",),
    TABLE,
    NORMS,
    read,
    labels=("Starcoder2ForSequenceClassification", "Starcoder2ForTokenClassification"),
    bare=("Starcoder2Model",),
)
