"""Cohere (Command R): parallel blocks, LayerNorms without a shift, pairs side by side.

Command R7B (cohere2) has layers without rotary positions. Logits are scaled: no group changes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import llama
from symmerge.families.base import Reading
from symmerge.families.decoders import decoder
from symmerge.families.spaces import regrouped, without_positions
from symmerge.symmetry.groups import OrthogonalFixingOnes, RotaryPairs

TABLE = (
    """
model.embed_tokens.weight                         vocabulary   residual
model.layers.{i}.input_layernorm.weight           residual~
"""
    + llama.ATTENTION
    + llama.GATED
    + """
model.norm.weight                                 residual~
lm_head.weight                                    vocabulary   residual*       if untied
"""
)
NORMS = """
model.layers.{i}.input_layernorm  -> model.layers.{i}.self_attn.q_proj
    model.layers.{i}.self_attn.k_proj model.layers.{i}.self_attn.v_proj
    model.layers.{i}.mlp.gate_proj model.layers.{i}.mlp.up_proj
model.norm                        -> lm_head
"""


def read(config: Any, names: Collection[str]) -> Reading:
    if getattr(config, "use_qk_norm", False):
        raise UnsupportedModel(
            "cohere with use_qk_norm has a norm of its own for every head, which no table"
            " describes yet: use a model without it"
        )
    size = llama.head_size(config)
    groups = {
        "residual": OrthogonalFixingOnes(config.hidden_size),
        "qk.{i}": RotaryPairs(size, size, "interleaved"),
    }
    reading = regrouped(llama.read(config, names), **groups)
    kinds = config.layer_types if config.model_type == "cohere2" else []
    # Only layers with a sliding window rotate.
    layers = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return without_positions(reading, layers, size)


FAMILY = decoder(
    "cohere",
    ("Cohere", "Cohere2"),
    TABLE,
    NORMS,
    read,
    types=("cohere", "cohere2"),
    bare=("CohereModel", "Cohere2Model"),
)
