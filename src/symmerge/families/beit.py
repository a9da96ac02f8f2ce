"""BEiT: ViT with layer scales, keys without a bias, and a number for each distance and head."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import vit
from symmerge.families.base import (
    Family,
    Head,
    Reading,
    pair,
    with_bare,
)
from symmerge.families.spaces import feed_forward

TABLE = (
    vit.PATCHES
    + """
{base}.embeddings.mask_token                one one      residual   if mask
{base}.embeddings.position_embeddings       one position residual   if positions
{base}.layers.{i}.lambda_1                  residual~               if scales
{base}.layers.{i}.lambda_2                  residual~               if scales
{base}.layers.{i}.relative_position_bias.relative_position_bias_table
    distance head.{i}~                                              if distances
"""
    + vit.LAYER.replace("{layer}", "{base}.layers.{i}")
    + """
{base}.layernorm.weight                     residual~               if first
{base}.layernorm.bias                       residual                if first
{base}.pooler.layernorm.weight              residual~               if pools
{base}.pooler.layernorm.bias                residual                if pools
classifier.weight                           label        residual*
classifier.bias                             label
"""
).replace("{base}", "beit")
NORMS = (
    vit.LAYER_NORMS.replace("{layer}", "beit.layers.{i}")
    + """
beit.layernorm         -> classifier  if first
beit.pooler.layernorm  -> classifier  if pools
"""
)
SCALES = """
beit.layers.{i}.lambda_1  <- beit.layers.{i}.attention.o_proj  if scales
beit.layers.{i}.lambda_2  <- beit.layers.{i}.mlp.fc2           if scales
"""


def read(config: Any, names: Collection[str]) -> Reading:
    if config.use_shared_relative_position_bias:
        raise UnsupportedModel(
            "beit with use_shared_relative_position_bias ties the heads of all layers, which this"
            " table does not describe: use a fine-tuned model, which has them per layer"
        )
    sides = (
        side // patch
        for side, patch in zip(pair(config.image_size), pair(config.patch_size), strict=True)
    )
    height, width = sides
    distances = (2 * height - 1) * (2 * width - 1) + 3  # and three for the class token
    units = feed_forward(config.hidden_act, config.intermediate_size)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=vit.vision_spaces(config, units, **vit.patch_sizes(config), distance=distances),
        flags={
            "qkv_bias": True,
            "key_bias": False,
            "plain": True,
            "mask": config.use_mask_token,
            "positions": config.use_absolute_position_embeddings,
            "scales": config.layer_scale_init_value > 0,
            "distances": config.use_relative_position_bias,
            "pools": config.use_mean_pooling,
            "first": not config.use_mean_pooling,
        },
    )


HEADED = Family(
    name="beit",
    model_types=("beit",),
    architectures={"BeitForImageClassification": Head("image-classification", "classifier.weight")},
    table=TABLE,
    norms=NORMS,
    scales=SCALES,
    read=read,
    renames=(
        (
            r"\.attention\.attention\.relative_position_bias\.",
            ".relative_position_bias.",
        ),
        *vit.renames("beit"),
    ),
    buffers=(r"relative_position_index$",),
)
FAMILY = with_bare(HEADED, "beit.", "image-features", ("BeitModel",))
