"""ViT and DeiT for image classification: pre-LayerNorm, learned positions, a class token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    pair,
    with_bare,
)
from symmerge.families.spaces import (
    attention,
    feed_forward,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, Group, OrthogonalFixingOnes
from symmerge.symmetry.spec import Space

# Parts that BEiT and DINOv2 share.
PATCHES = """
{base}.embeddings.cls_token                           one one      residual
{base}.embeddings.patch_embeddings.projection.weight
    residual     channel patch_height patch_width
{base}.embeddings.patch_embeddings.projection.bias    residual
"""
LAYER = """
{layer}.layernorm_before.weight             residual~
{layer}.layernorm_before.bias               residual
{layer}.attention.q_proj.weight             (head.{i} qk.{i})   residual*
{layer}.attention.q_proj.bias               (head.{i} qk.{i})   if qkv_bias
{layer}.attention.k_proj.weight             (head.{i} qk.{i}*)  residual*
{layer}.attention.k_proj.bias               (head.{i} qk.{i}*)  if key_bias
{layer}.attention.v_proj.weight             (head.{i} vo.{i})   residual*
{layer}.attention.v_proj.bias               (head.{i} vo.{i})   if qkv_bias
{layer}.attention.o_proj.weight             residual     (head.{i} vo.{i}*)
{layer}.attention.o_proj.bias               residual
{layer}.layernorm_after.weight              residual~
{layer}.layernorm_after.bias                residual
{layer}.mlp.fc1.weight                      ff.{i}       residual*  if plain
{layer}.mlp.fc1.bias                        ff.{i}                  if plain
{layer}.mlp.fc2.weight                      residual     ff.{i}*    if plain
{layer}.mlp.fc2.bias                        residual                if plain
"""
LAYER_NORMS = """
{layer}.layernorm_before  -> {layer}.attention.q_proj
    {layer}.attention.k_proj {layer}.attention.v_proj
{layer}.layernorm_after   -> {layer}.mlp.fc1  if plain
"""
TABLE = (
    PATCHES
    + """
{base}.embeddings.position_embeddings                 one position residual
{base}.embeddings.distillation_token                  one one      residual   if distilled
"""
    + LAYER.replace("{layer}", "{base}.layers.{i}")
    + """
{base}.layernorm.weight                               residual~
{base}.layernorm.bias                                 residual
{base}.pooler.dense.weight                            pooled       residual*  if pooler
{base}.pooler.dense.bias                              pooled                  if pooler
classifier.weight                                     label        residual*  if classifier
classifier.bias                                       label                   if classifier
cls_classifier.weight                                 label        residual*  if teacher
cls_classifier.bias                                   label                   if teacher
distillation_classifier.weight                        label        residual*  if teacher
distillation_classifier.bias                          label                   if teacher
"""
)
NORMS = (
    LAYER_NORMS.replace("{layer}", "{base}.layers.{i}")
    + """
{base}.layernorm  -> classifier                               if classifier
{base}.layernorm  -> cls_classifier distillation_classifier   if teacher
"""
)


def patch_sizes(config: Any, tokens: int = 1) -> dict[str, int]:
    """What of an image's patches can be seen; `tokens` have positions beside them."""
    (height, width), (patch_height, patch_width) = pair(config.image_size), pair(config.patch_size)
    return {
        "one": 1,
        "position": (height // patch_height) * (width // patch_width) + tokens,
        "channel": config.num_channels,
        "patch_height": patch_height,
        "patch_width": patch_width,
        "label": config.num_labels,
    }


def vision_spaces(config: Any, units: Group, **shown: int) -> tuple[Space, ...]:
    """The spaces of a vision transformer; `shown` are those that can be seen."""
    basis = GeneralLinear(config.hidden_size // config.num_attention_heads)
    return (
        *visible(**shown),
        Space("residual", OrthogonalFixingOnes(config.hidden_size)),
        *attention(heads=config.num_attention_heads, qk=basis, vo=basis),
        Space("ff.{i}", units),
    )


def read(config: Any, names: Collection[str]) -> Reading:
    distilled = config.model_type == "deit"
    teacher = config.architectures[0].endswith("WithTeacher")
    shown = patch_sizes(config, tokens=1 + distilled)
    units = feed_forward(config.hidden_act, config.intermediate_size)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=vision_spaces(config, units, **shown, pooled=config.pooler_output_size),
        flags={
            "qkv_bias": config.qkv_bias,
            "key_bias": config.qkv_bias,
            "plain": True,
            "pooler": "pooler.dense.weight" in names,
            "distilled": distilled,
            "teacher": teacher,
            "classifier": not teacher,
        },
    )


def renames(base: str) -> tuple[tuple[str, str], ...]:
    """Names of files: transformers 5 renamed the modules but still writes the old names."""
    return (
        (rf"^{base}\.encoder\.layer\.", f"{base}.layers."),
        (r"\.attention\.attention\.query\.", ".attention.q_proj."),
        (r"\.attention\.attention\.key\.", ".attention.k_proj."),
        (r"\.attention\.attention\.value\.", ".attention.v_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    )


def _family(base: str, heads: dict[str, Head], bare: str) -> Family:
    family = Family(
        name=base,
        model_types=(base,),
        architectures=heads,
        table=TABLE.replace("{base}", base),
        norms=NORMS.replace("{base}", base),
        read=read,
        renames=renames(base),
    )
    return with_bare(family, f"{base}.", "image-features", (bare,))


CLASSES = "image-classification"
FAMILY = _family(
    "vit", {"ViTForImageClassification": Head(CLASSES, "classifier.weight")}, "ViTModel"
)
DEIT = _family(
    "deit",
    {
        "DeiTForImageClassification": Head(CLASSES, "classifier.weight"),
        "DeiTForImageClassificationWithTeacher": Head(CLASSES, "cls_classifier.weight"),
    },
    "DeiTModel",
)
