"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

Experts change places with their rows of the router; units change places inside each expert, and
scale, as in any gated layer. Shared experts of Qwen2-MoE are one more gated layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import llama, olmo2, qwen3
from symmerge.families.base import (
    Family,
    Reading,
)
from symmerge.families.decoders import ANSWERS, CLASSIFIER, TASKS, TOKENS, decoder
from symmerge.families.parts import Part
from symmerge.families.spaces import gated
from symmerge.symmetry.groups import Permutation, Trivial
from symmerge.symmetry.spec import Space

EXPERTS = """
model.layers.{i}.mlp.gate.weight                  expert.{i}   residual*
model.layers.{i}.mlp.experts.gate_up_proj         expert.{i}   (ff.{i}~ + ff.{i})  residual*
model.layers.{i}.mlp.experts.down_proj            expert.{i}   residual            ff.{i}*
model.layers.{i}.mlp.shared_expert.gate_proj.weight  shared.{i}~  residual*     if shared
model.layers.{i}.mlp.shared_expert.up_proj.weight    shared.{i}   residual*     if shared
model.layers.{i}.mlp.shared_expert.down_proj.weight  residual     shared.{i}*   if shared
model.layers.{i}.mlp.shared_expert_gate.weight       one          residual*     if shared
"""
READERS = """
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate
    model.layers.{i}.mlp.experts.gate_up_proj  if unshared
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate
    model.layers.{i}.mlp.experts.gate_up_proj model.layers.{i}.mlp.shared_expert.gate_proj
    model.layers.{i}.mlp.shared_expert.up_proj model.layers.{i}.mlp.shared_expert_gate  if shared
"""
PLAIN_READERS = """
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate_proj
    model.layers.{i}.mlp.up_proj
"""
NORMS = llama.NORMS.replace(PLAIN_READERS.strip(), READERS.strip())
TABLE = llama.TABLE.replace(llama.GATED, EXPERTS)
QWEN3 = qwen3.TABLE.replace(llama.GATED, EXPERTS)
OLMOE = TABLE.replace(llama.ATTENTION, qwen3.ATTENTION) + olmo2.NORMED

PREFIX = r"((?:\w+\.)?layers\.\d+\.)"  # bare models have none, heads for answers another
MIXTRAL_PARTS = tuple(
    Part(rf"{PREFIX}block_sparse_moe\.experts\.(\d+)\.{stored}\.weight", f"mlp.experts.{name}", at)
    for stored, name, at in (
        ("w1", "gate_up_proj", 0),
        ("w3", "gate_up_proj", 1),
        ("w2", "down_proj", 0),
    )
)
QWEN_PARTS = tuple(
    Part(rf"{PREFIX}mlp\.experts\.(\d+)\.{stored}\.weight", f"mlp.experts.{name}", at)
    for stored, name, at in (
        ("gate_proj", "gate_up_proj", 0),
        ("up_proj", "gate_up_proj", 1),
        ("down_proj", "down_proj", 0),
    )
)
Reader = Callable[[Any, Collection[str]], Reading]


def _with_experts(base: Reader, experts: str, units: str) -> Reader:
    """A reader of the dense model, and the names of the settings that count experts and units."""

    def read(config: Any, names: Collection[str]) -> Reading:
        _check(config)
        reading = base(config, names)
        shared = config.model_type == "qwen2_moe"
        hidden = getattr(config, "shared_expert_intermediate_size", 1)
        others = [space for space in reading.spaces if space.name != "ff.{i}"]
        spaces = (
            *others,
            Space("expert.{i}", Permutation(getattr(config, experts))),
            Space("ff.{i}", gated(getattr(config, units)), per="expert.{i}"),
            Space("shared.{i}", gated(hidden)),
            Space("one", Trivial(1)),
        )
        flags = {**reading.flags, "shared": shared, "unshared": not shared}
        if shared:
            flags["qkv_bias"] = config.qkv_bias
        return replace(reading, spaces=spaces, flags=flags)

    return read


def _check(config: Any) -> None:
    """Refuse layers without experts among those that have them, and limited queries."""
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        raise UnsupportedModel(
            f"{config.model_type} with mlp_only_layers or a decoder_sparse_step has layers without"
            " experts, which no table describes yet: use a model with experts in every layer"
        )
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedModel(
            f"{config.model_type} with clip_qkv limits every coordinate of queries, keys and"
            " values, which no table describes yet: use a model without it"
        )


def _family(
    name: str,
    stem: str,
    table: str,
    read: Reader,
    parts: tuple[Part, ...],
    *,
    labels: Iterable[str] = (),
    renamed: Iterable[str] = (),
) -> Family:
    """A family of one stem; `labels` and `renamed` are ends of its classes (`decoder`)."""
    return decoder(
        name,
        (stem,),
        table,
        NORMS,
        read,
        labels=(stem + end for end in labels),
        renamed=(stem + end for end in renamed),
        bare=(f"{stem}Model",),
        renames=((r"\.block_sparse_moe\.", ".mlp."),),
        parts=parts,
    )


MIXTRAL = _family(
    "mixtral",
    "Mixtral",
    TABLE,
    _with_experts(llama.read, "num_local_experts", "intermediate_size"),
    MIXTRAL_PARTS,
    labels=TASKS,
)
QWEN2_MOE = _family(
    "qwen2_moe",
    "Qwen2Moe",
    TABLE,
    _with_experts(llama.read, "num_experts", "moe_intermediate_size"),
    QWEN_PARTS,
    labels=TASKS,
)
QWEN3_MOE = _family(
    "qwen3_moe",
    "Qwen3Moe",
    QWEN3,
    _with_experts(qwen3.read, "num_experts", "moe_intermediate_size"),
    QWEN_PARTS,
    labels=(CLASSIFIER, TOKENS),
    renamed=(ANSWERS,),
)
OLMOE_FAMILY = _family(
    "olmoe",
    "Olmoe",
    OLMOE,
    _with_experts(qwen3.read, "num_experts", "intermediate_size"),
    QWEN_PARTS,
)
