"""GPT-OSS: experts whose units are limited, and a sink beside the scores of every head.

Gate and up projection of a unit lie side by side and change places together; neither may scale,
because both are limited. Attention weights do not sum to one, so value biases do not pass, and a
constant on the keys is seen beside the sink.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from symmerge.families import experts, llama
from symmerge.families.base import Reading
from symmerge.families.decoders import CLASSIFIER, TOKENS, decoder
from symmerge.families.spaces import visible
from symmerge.symmetry.groups import Permutation
from symmerge.symmetry.spec import Space

EXPERTS = """
model.layers.{i}.self_attn.sinks                  (head.{i}~ query.{i}~)
model.layers.{i}.mlp.router.weight                expert.{i}   residual*
model.layers.{i}.mlp.router.bias                  expert.{i}
model.layers.{i}.mlp.experts.gate_up_proj         expert.{i}   residual*   (ff.{i} side)
model.layers.{i}.mlp.experts.gate_up_proj_bias    expert.{i}   (ff.{i} side)
model.layers.{i}.mlp.experts.down_proj            expert.{i}   ff.{i}*     residual
model.layers.{i}.mlp.experts.down_proj_bias       expert.{i}   residual
"""
READERS = """
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.router
    model.layers.{i}.mlp.experts.gate_up_proj
"""
TABLE = llama.TABLE.replace(llama.GATED, EXPERTS)
NORMS = llama.NORMS.replace(experts.PLAIN_READERS.strip(), READERS.strip())


def read(config: Any, names: Collection[str]) -> Reading:
    reading = llama.read(config, names)
    others = [
        replace(space, translation=None) for space in reading.spaces if space.name != "ff.{i}"
    ]
    spaces = (
        *others,
        *visible(side=2),
        Space("expert.{i}", Permutation(config.num_local_experts)),
        Space("ff.{i}", Permutation(config.intermediate_size), per="expert.{i}"),
    )
    return replace(reading, spaces=spaces)


FAMILY = decoder(
    "gpt_oss",
    ("GptOss",),
    TABLE,
    NORMS,
    read,
    labels=("GptOss" + CLASSIFIER, "GptOss" + TOKENS),
    bare=("GptOssModel",),
)
