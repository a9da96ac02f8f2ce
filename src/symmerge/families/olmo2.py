"""OLMo 2 and 3: norms on what blocks write, and on all queries and all keys of a layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from symmerge.families import llama, qwen3
from symmerge.families.base import Family, Head, Reading
from symmerge.symmetry.groups import SignedPermutation
from symmerge.symmetry.spec import Space

# The gain of a norm that writes to the stream follows its order, and no sign. Norms of queries and
# keys run over all heads, whose gains move with them; a pair can change its sign.
TABLE = (
    """
model.embed_tokens.weight                           vocabulary   residual
"""
    + qwen3.ATTENTION
    + """
model.layers.{i}.self_attn.q_norm.weight            (head.{i} query.{i} half qk.{i}~)
model.layers.{i}.self_attn.k_norm.weight            (head.{i} half qk.{i}~)
model.layers.{i}.post_attention_layernorm.weight    residual~
"""
    + llama.GATED
    + """
model.layers.{i}.post_feedforward_layernorm.weight  residual~
model.norm.weight                                   residual~
lm_head.weight                                      vocabulary   residual*  if untied
"""
)


def read(config: Any, names: Collection[str]) -> Reading:
    reading = qwen3.read(config, names)
    stream = Space("residual", SignedPermutation(config.hidden_size))
    spaces = {space.name: space for space in reading.spaces} | {"residual": stream}
    return replace(reading, spaces=tuple(spaces.values()))


FAMILY = Family(
    name="olmo2",
    model_types=("olmo2", "olmo3"),
    architectures=dict.fromkeys(
        ("Olmo2ForCausalLM", "Olmo3ForCausalLM"), Head("causal-lm", "model.embed_tokens.weight")
    ),
    table=TABLE,
    norms="",
    read=read,
    ties=llama.FAMILY.ties,
    buffers=llama.FAMILY.buffers,
)
