"""GPT-NeoX and Pythia: pre-LayerNorm, partial rotary positions, QKV fused head by head."""

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
from symmerge.families.spaces import (
    feed_forward,
    rotary_size,
)
from symmerge.symmetry.groups import OrthogonalFixingOnes, RotaryPairs

# One table serves parallel and sequential blocks: the same maps write and read the stream.
TABLE = (
    """
gpt_neox.embed_in.weight                              vocabulary   residual
gpt_neox.layers.{i}.input_layernorm.weight            residual~
gpt_neox.layers.{i}.input_layernorm.bias              residual
gpt_neox.layers.{i}.attention.query_key_value.weight
    (head.{i} (qk.{i} + qk.{i}* + vo.{i}))  residual*
gpt_neox.layers.{i}.attention.query_key_value.bias
    (head.{i} (qk.{i} + qk.{i}* + vo.{i}))  if attention_bias
gpt_neox.layers.{i}.attention.dense.weight            residual     (head.{i} vo.{i}*)
gpt_neox.layers.{i}.attention.dense.bias              residual                if attention_bias
gpt_neox.layers.{i}.post_attention_layernorm.weight   residual~
gpt_neox.layers.{i}.post_attention_layernorm.bias     residual
gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight          ff.{i}       residual*
gpt_neox.layers.{i}.mlp.dense_h_to_4h.bias            ff.{i}
gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight          residual     ff.{i}*
gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias            residual
gpt_neox.final_layer_norm.weight                      residual~
gpt_neox.final_layer_norm.bias                        residual
"""
    + GPT_HEADS
)

NORMS = """
gpt_neox.layers.{i}.input_layernorm             -> gpt_neox.layers.{i}.attention.query_key_value
gpt_neox.layers.{i}.post_attention_layernorm    -> gpt_neox.layers.{i}.mlp.dense_h_to_4h
""" + gpt_last_norm("gpt_neox.final_layer_norm")


def read(config: Any, names: Collection[str]) -> Reading:
    size = config.hidden_size // config.num_attention_heads
    return Reading(
        layers=config.num_hidden_layers,
        spaces=gpt_spaces(
            config,
            stream=OrthogonalFixingOnes(config.hidden_size),
            qk=RotaryPairs(size, rotary=rotary_size(config, size)),
            ff=feed_forward(config.hidden_act, config.intermediate_size),
        ),
        flags={**head_flags(config), "attention_bias": config.attention_bias},
    )


FAMILY = decoder(
    "neox",
    ("GPTNeoX",),
    TABLE,
    NORMS,
    read,
    types=("gpt_neox",),
    labels=("GPTNeoX" + end for end in TASKS),
    bare=("GPTNeoXModel",),
    base="gpt_neox.",
    embedding="embed_in",
    renames=((r"^embed_out\.", "lm_head."),),
    buffers=(r"\.attention\.(bias|masked_bias)$", r"rotary_emb\.inv_freq$"),
)
