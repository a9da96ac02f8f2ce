"""DINOv2, with and without registers: ViT with layer scales and a classifier of two means."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families import vit
from symmerge.families.base import (
    Family,
    Head,
    Reading,
    with_bare,
)
from symmerge.families.parts import Fused
from symmerge.families.spaces import (
    feed_forward,
    gated,
)

LAYER = "{base}.encoder.layer.{i}"
NAMES = {"{layer}": LAYER, "layernorm_before": "norm1", "layernorm_after": "norm2"}


def _renamed(lines: str) -> str:
    for old, new in NAMES.items():
        lines = lines.replace(old, new)
    return lines


# The classifier reads the class token, and after it the mean of the patches.
TABLE = (
    vit.PATCHES
    + """
{base}.embeddings.mask_token                one residual            if mask
{base}.embeddings.register_tokens           one register residual   if registers
{base}.embeddings.position_embeddings       one position residual
"""
    + _renamed(vit.LAYER)
    + """
{base}.encoder.layer.{i}.mlp.gate_proj.weight         ff.{i}~  residual*  if gated
{base}.encoder.layer.{i}.mlp.gate_proj.bias           ff.{i}~             if gated
{base}.encoder.layer.{i}.mlp.up_proj.weight           ff.{i}   residual*  if gated
{base}.encoder.layer.{i}.mlp.up_proj.bias             ff.{i}              if gated
{base}.encoder.layer.{i}.mlp.down_proj.weight         residual ff.{i}*    if gated
{base}.encoder.layer.{i}.mlp.down_proj.bias           residual            if gated
{base}.encoder.layer.{i}.layer_scale1.lambda1         residual~
{base}.encoder.layer.{i}.layer_scale2.lambda1         residual~
{base}.layernorm.weight                     residual~
{base}.layernorm.bias                       residual
classifier.weight                           label    (residual* + residual*)
classifier.bias                             label
"""
)
NORMS = (
    _renamed(vit.LAYER_NORMS)
    + """
{base}.encoder.layer.{i}.norm2 -> {base}.encoder.layer.{i}.mlp.gate_proj
    {base}.encoder.layer.{i}.mlp.up_proj  if gated
{base}.layernorm  -> classifier
"""
)
SCALES = """
{base}.encoder.layer.{i}.layer_scale1.lambda1
    <- {base}.encoder.layer.{i}.attention.o_proj
{base}.encoder.layer.{i}.layer_scale2.lambda1
    <- {base}.encoder.layer.{i}.mlp.fc2        if plain
{base}.encoder.layer.{i}.layer_scale2.lambda1
    <- {base}.encoder.layer.{i}.mlp.down_proj  if gated
"""


# Files hold both branches of a gated unit as one (and transformers 5 still writes them so).
BRANCHES = Fused(
    r"((?:\w+\.)?encoder\.layer\.\d+\.mlp\.)weights_in\.(weight|bias)",
    (r"\1gate_proj.\2", r"\1up_proj.\2"),
)


def read(config: Any, names: Collection[str]) -> Reading:
    units = int(config.hidden_size * config.mlp_ratio)
    if is_gated := config.use_swiglu_ffn:
        units = (int(units * 2 / 3) + 7) // 8 * 8  # two thirds, up to whole eights
    group = gated(units) if is_gated else feed_forward(config.hidden_act, units)
    registers = getattr(config, "num_register_tokens", 0)
    shown = {**vit.patch_sizes(config), "register": registers}
    return Reading(
        layers=config.num_hidden_layers,
        spaces=vit.vision_spaces(config, group, **shown),
        flags={
            "qkv_bias": config.qkv_bias,
            "key_bias": config.qkv_bias,
            "plain": not is_gated,
            "gated": is_gated,
            "mask": getattr(config, "use_mask_token", True),
            "registers": config.model_type == "dinov2_with_registers",
        },
    )


def _family(base: str, stem: str) -> Family:
    marker = f"{base}.embeddings.mask_token"
    family = Family(
        name=base,
        model_types=(base,),
        architectures={f"{stem}ForImageClassification": Head("image-classification", marker)},
        table=TABLE.replace("{base}", base),
        norms=NORMS.replace("{base}", base),
        scales=SCALES.replace("{base}", base),
        read=read,
        renames=(*vit.renames(base)[1:-2], (r"\.mlp\.weights_out\.", ".mlp.down_proj.")),
        parts=(BRANCHES,),
    )
    return with_bare(family, f"{base}.", "image-features", (f"{stem}Model",))


FAMILY = _family("dinov2", "Dinov2")
REGISTERS = _family("dinov2_with_registers", "Dinov2WithRegisters")
