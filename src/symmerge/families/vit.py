"""ViT for image classification: pre-LayerNorm, learned positions, a class token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    attention,
    feed_forward,
    pair,
    visible,
    with_bare,
)
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes
from symmerge.symmetry.spec import Space

TABLE = """
vit.embeddings.cls_token                           one one      residual
vit.embeddings.position_embeddings                 one position residual
vit.embeddings.patch_embeddings.projection.weight  residual     channel patch_height patch_width
vit.embeddings.patch_embeddings.projection.bias    residual
vit.layers.{i}.layernorm_before.weight             residual~
vit.layers.{i}.layernorm_before.bias               residual
vit.layers.{i}.attention.q_proj.weight             (head.{i} qk.{i})   residual*
vit.layers.{i}.attention.q_proj.bias               (head.{i} qk.{i})   if qkv_bias
vit.layers.{i}.attention.k_proj.weight             (head.{i} qk.{i}*)  residual*
vit.layers.{i}.attention.k_proj.bias               (head.{i} qk.{i}*)  if qkv_bias
vit.layers.{i}.attention.v_proj.weight             (head.{i} vo.{i})   residual*
vit.layers.{i}.attention.v_proj.bias               (head.{i} vo.{i})   if qkv_bias
vit.layers.{i}.attention.o_proj.weight             residual     (head.{i} vo.{i}*)
vit.layers.{i}.attention.o_proj.bias               residual
vit.layers.{i}.layernorm_after.weight              residual~
vit.layers.{i}.layernorm_after.bias                residual
vit.layers.{i}.mlp.fc1.weight                      ff.{i}       residual*
vit.layers.{i}.mlp.fc1.bias                        ff.{i}
vit.layers.{i}.mlp.fc2.weight                      residual     ff.{i}*
vit.layers.{i}.mlp.fc2.bias                        residual
vit.layernorm.weight                               residual~
vit.layernorm.bias                                 residual
vit.pooler.dense.weight                            pooled       residual*  if pooler
vit.pooler.dense.bias                              pooled                  if pooler
classifier.weight                                  label        residual*
classifier.bias                                    label
"""

NORMS = """
vit.layers.{i}.layernorm_before  -> vit.layers.{i}.attention.q_proj
    vit.layers.{i}.attention.k_proj vit.layers.{i}.attention.v_proj
vit.layers.{i}.layernorm_after   -> vit.layers.{i}.mlp.fc1
vit.layernorm                    -> classifier
"""


def read(config: Any, names: Collection[str]) -> Reading:
    (height, width), (patch_height, patch_width) = pair(config.image_size), pair(config.patch_size)
    basis = GeneralLinear(config.hidden_size // config.num_attention_heads)
    visible_sizes = {
        "one": 1,
        "position": (height // patch_height) * (width // patch_width) + 1,
        "channel": config.num_channels,
        "patch_height": patch_height,
        "patch_width": patch_width,
        "label": config.num_labels,
        "pooled": config.pooler_output_size,
    }
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(**visible_sizes),
            Space("residual", OrthogonalFixingOnes(config.hidden_size)),
            *attention(heads=config.num_attention_heads, qk=basis, vo=basis),
            Space("ff.{i}", feed_forward(config.hidden_act, config.intermediate_size)),
        ),
        flags={"qkv_bias": config.qkv_bias, "pooler": "pooler.dense.weight" in names},
    )


HEADED = Family(
    name="vit",
    model_types=("vit",),
    architectures={"ViTForImageClassification": Head("image-classification", "classifier.weight")},
    table=TABLE,
    norms=NORMS,
    read=read,
    # transformers 5 renamed the modules but still writes the old names; both are read
    renames=(
        (r"^vit\.encoder\.layer\.", "vit.layers."),
        (r"\.attention\.attention\.query\.", ".attention.q_proj."),
        (r"\.attention\.attention\.key\.", ".attention.k_proj."),
        (r"\.attention\.attention\.value\.", ".attention.v_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    ),
)
FAMILY = with_bare(HEADED, "vit.", "image-features", ("ViTModel",))
