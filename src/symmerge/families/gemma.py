"""Gemma 2 and 3 (text): norms on what blocks read and on what they write, gains of 1 + w.

Embeddings are multiplied by a number, scores and logits may be capped: no group changes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from symmerge.families import llama, olmo2, qwen3
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder
from symmerge.families.spaces import normed_writers

# A gain of 1 + w moves as w does: it follows the order of the stream, and no sign.
NORMS = """
model.layers.{i}.input_layernorm.weight             residual~
model.layers.{i}.pre_feedforward_layernorm.weight   residual~
"""
TABLE2 = (
    """
model.embed_tokens.weight                           vocabulary   residual
"""
    + NORMS
    + llama.ATTENTION
    + olmo2.WRITTEN
    + llama.HEADS
)
# Norms of single heads, as in Qwen3.
TABLE3 = TABLE2.replace(llama.ATTENTION, qwen3.ATTENTION + qwen3.NORMED)


def read2(config: Any, names: Collection[str]) -> Reading:
    return replace(normed_writers(llama.read(config, names)), gain_offset=1.0)


def read3(config: Any, names: Collection[str]) -> Reading:
    return replace(normed_writers(qwen3.read(config, names)), gain_offset=1.0)


GEMMA2 = decoder(
    "gemma2",
    ("Gemma2",),
    TABLE2,
    "",
    read2,
    labels=("Gemma2ForSequenceClassification", "Gemma2ForTokenClassification"),
    bare=("Gemma2Model",),
)
GEMMA3 = decoder(
    "gemma3",
    ("Gemma3",),
    TABLE3,
    "",
    read3,
    types=("gemma3_text",),
    labels=("Gemma3TextForSequenceClassification",),
    bare=("Gemma3TextModel",),
)
