"""OLMo 2 and 3: norms on what blocks write, and on all queries and all keys of a layer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families import llama, qwen3
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder
from symmerge.families.spaces import normed_writers

# The gain of a norm that writes to the stream follows its order, and no sign. Norms of queries and
# keys run over all heads, whose gains move with them; a pair can change its sign.
NORMED = """
model.layers.{i}.self_attn.q_norm.weight            (head.{i} query.{i} half qk.{i}~)
model.layers.{i}.self_attn.k_norm.weight            (head.{i} half qk.{i}~)
"""
WRITTEN = (
    """
model.layers.{i}.post_attention_layernorm.weight    residual~
"""
    + llama.GATED
    + """
model.layers.{i}.post_feedforward_layernorm.weight  residual~
model.norm.weight                                   residual~
"""
)
TABLE = (
    """
model.embed_tokens.weight                           vocabulary   residual
"""
    + qwen3.ATTENTION
    + NORMED
    + WRITTEN
    + llama.HEADS
)


def read(config: Any, names: Collection[str]) -> Reading:
    return normed_writers(qwen3.read(config, names))


FAMILY = decoder(
    "olmo2",
    ("Olmo2", "Olmo3"),
    TABLE,
    "",
    read,
    types=("olmo2", "olmo3"),
    labels=("Olmo2ForSequenceClassification", "Olmo3ForSequenceClassification"),
    bare=("Olmo2Model", "Olmo3Model"),
)
