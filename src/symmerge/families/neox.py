"""GPT-NeoX and Pythia: pre-LayerNorm, partial rotary positions, QKV fused head by head."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    attention,
    feed_forward,
    rotary_size,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes, RotaryPairs
from symmerge.symmetry.spec import Space

# One table serves parallel and sequential blocks: the same maps write and read the stream.
TABLE = """
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
lm_head.weight                                        vocabulary   residual*  if untied
"""

NORMS = """
gpt_neox.layers.{i}.input_layernorm             -> gpt_neox.layers.{i}.attention.query_key_value
gpt_neox.layers.{i}.post_attention_layernorm    -> gpt_neox.layers.{i}.mlp.dense_h_to_4h
gpt_neox.final_layer_norm                       -> lm_head
"""


def read(config: Any, names: Collection[str]) -> Reading:
    heads = config.num_attention_heads
    head_size = config.hidden_size // heads
    qk = RotaryPairs(head_size, rotary=rotary_size(config, head_size))
    vo = GeneralLinear(head_size)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(vocabulary=config.vocab_size),
            Space("residual", OrthogonalFixingOnes(config.hidden_size)),
            *attention(heads=heads, qk=qk, vo=vo),
            Space("ff.{i}", feed_forward(config.hidden_act, config.intermediate_size)),
        ),
        flags={"untied": not config.tie_word_embeddings, "attention_bias": config.attention_bias},
    )


FAMILY = Family(
    name="neox",
    model_types=("gpt_neox",),
    architectures={"GPTNeoXForCausalLM": Head("causal-lm", "gpt_neox.embed_in.weight")},
    table=TABLE,
    norms=NORMS,
    read=read,
    ties={"lm_head.weight": "gpt_neox.embed_in.weight"},
    renames=((r"^embed_out\.", "lm_head."),),
    buffers=(r"\.attention\.(bias|masked_bias)$", r"rotary_emb\.inv_freq$"),
)
