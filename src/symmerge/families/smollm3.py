"""SmolLM3: Llama, in which some layers have no rotary positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families import llama
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder
from symmerge.families.spaces import without_positions


def read(config: Any, names: Collection[str]) -> Reading:
    reading = llama.read(config, names)
    layers = [
        i for i in range(config.num_hidden_layers) if not config.no_rope_layers[i]
    ]  # one: rotary
    return without_positions(reading, layers, llama.head_size(config))


FAMILY = decoder(
    "smollm3",
    ("SmolLM3",),
    llama.TABLE,
    llama.NORMS,
    read,
    labels=("SmolLM3ForSequenceClassification", "SmolLM3ForTokenClassification"),
    renamed=("SmolLM3ForQuestionAnswering",),
    bare=("SmolLM3Model",),
)
