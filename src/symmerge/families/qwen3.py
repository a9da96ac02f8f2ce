"""Qwen3: Llama with a norm on every query and key, before the rotary positions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from symmerge.families import llama
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder
from symmerge.families.spaces import visible
from symmerge.symmetry.groups import Signs
from symmerge.symmetry.spec import Space

# A head is two halves that hold a coordinate of each rotary pair. Its norm has a gain per
# coordinate, the same for all heads, so that inside one head a pair can change its sign at most:
# a scale would change the norm, a turn would need the two gains of the pair to be equal.
ATTENTION = llama.ATTENTION.replace("qk.{i}", "half qk.{i}")
NORMED = """
model.layers.{i}.self_attn.q_norm.weight          (half angle)
model.layers.{i}.self_attn.k_norm.weight          (half angle)
"""
TABLE = llama.TABLE.replace(llama.ATTENTION, ATTENTION) + NORMED


def read(config: Any, names: Collection[str]) -> Reading:
    reading = llama.read(config, names)
    spaces = {space.name: space for space in reading.spaces}
    pairs = spaces["qk.{i}"].group.size // 2
    # A bias of keys goes through their norm: it does not drop out of the softmax.
    qk = Space("qk.{i}", Signs(pairs), per="head.{i}")
    spaces |= {"qk.{i}": qk}
    return replace(reading, spaces=(*spaces.values(), *visible(half=2, angle=pairs)))


FAMILY = decoder(
    "qwen3",
    ("Qwen3",),
    TABLE,
    llama.NORMS,
    read,
    labels=("Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"),
    renamed=("Qwen3ForQuestionAnswering",),
    bare=("Qwen3Model",),
)
