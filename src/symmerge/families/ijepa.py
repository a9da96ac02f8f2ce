"""I-JEPA for image classification: a ViT without a class token, whose patches are averaged."""

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
from symmerge.families.spaces import feed_forward

_, *PATCHES = vit.PATCHES.strip().splitlines()  # the first line is the class token
TABLE = (
    "\n".join(PATCHES)
    + """
{base}.embeddings.position_embeddings       one position residual
"""
    + vit.LAYER.replace("{layer}", "{base}.layers.{i}")
    + """
{base}.layernorm.weight                     residual~
{base}.layernorm.bias                       residual
classifier.weight                           label        residual*
classifier.bias                             label
"""
).replace("{base}", "ijepa")
NORMS = (
    vit.LAYER_NORMS.replace("{layer}", "ijepa.layers.{i}")
    + """
ijepa.layernorm  -> classifier
"""
)


def read(config: Any, names: Collection[str]) -> Reading:
    units = feed_forward(config.hidden_act, config.intermediate_size)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=vit.vision_spaces(config, units, **vit.patch_sizes(config, tokens=0)),
        flags={"qkv_bias": config.qkv_bias, "key_bias": config.qkv_bias, "plain": True},
    )


HEADED = Family(
    name="ijepa",
    model_types=("ijepa",),
    architectures={
        "IJepaForImageClassification": Head("image-classification", "classifier.weight")
    },
    table=TABLE,
    norms=NORMS,
    read=read,
    renames=vit.renames("ijepa"),
)
FAMILY = with_bare(HEADED, "ijepa.", "image-features", ("IJepaModel",))
