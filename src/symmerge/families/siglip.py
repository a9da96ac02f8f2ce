"""SigLIP: CLIP's towers, images read by a probe, and scores with a scale and a bias.

The function of `SiglipModel` is its scores, as that of `CLIPModel`. The space of the pooled vectors
has a LayerNorm inside the pooling head, which keeps its ones vector.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families import towers
from symmerge.families.base import (
    Family,
    Head,
    Reading,
)
from symmerge.families.spaces import (
    feed_forward,
    visible,
)
from symmerge.families.towers import alone, beside
from symmerge.symmetry.groups import GeneralLinear, Group, OrthogonalFixingOnes, Trivial
from symmerge.symmetry.spec import Space

# The queries of the pooling head read the probe, and the rest of its fused matrix the stream. The
# probe is a constant, and becomes part of the queries' bias in the canonical form.
POOLING = """
{t}head.probe                       one one      residual{m}
{t}head.attention.in_proj_weight
    ((head.pool qk.pool) + (head.pool qk.pool*) + (head.pool vo.pool))  residual{m}*
{t}head.attention.in_proj_bias
    ((head.pool qk.pool) + (head.pool qk.pool*) + (head.pool vo.pool))
{t}head.attention.out_proj.weight   joint        (head.pool vo.pool*)
{t}head.attention.out_proj.bias     joint
{t}head.layernorm.weight            joint~
{t}head.layernorm.bias              joint
{t}head.mlp.fc1.weight              units.pool   joint*
{t}head.mlp.fc1.bias                units.pool
{t}head.mlp.fc2.weight              joint        units.pool*
{t}head.mlp.fc2.bias                joint
"""
TEXT = (
    towers.TEXT
    + """
{t}head.weight                      joint        residual{m}*
{t}head.bias                        joint
"""
)
IMAGES = (
    """
{t}embeddings.patch_embedding.bias  residual{m}
"""
    + towers.PATCHES
    + towers.LAYERS
    + towers.LAST
)
TABLE = (
    beside(TEXT, "text_model.", "scores")
    + beside(IMAGES, "vision_model.")
    + beside(POOLING, "vision_model.", "pools")
    + """
logit_scale        one                          if scores
logit_bias         one                          if scores
classifier.weight  label  residual.vision*      if classifier
classifier.bias    label                        if classifier
"""
)
NORMS = (
    beside(towers.LAYER_NORMS + "{t}final_layer_norm -> {t}head\n", "text_model.", "scores")
    + beside(towers.LAYER_NORMS, "vision_model.")
    + """
vision_model.post_layernorm  -> vision_model.head.attention.in_proj_weight             if scores
vision_model.post_layernorm  -> vision_model.head.attention.in_proj_weight classifier  if both
vision_model.post_layernorm  -> classifier                                             if unpooled
vision_model.head.layernorm  -> vision_model.head.mlp.fc1                              if pools
"""
)
CONSTANTS = """
vision_model.head.probe  -> vision_model.head.attention.in_proj_weight qk.pool  if pools
"""


def read(config: Any, names: Collection[str]) -> Reading:
    text, images = config.text_config, config.vision_config
    scores, pools = config.architectures[0] == "SiglipModel", _pools(images)
    streams = [OrthogonalFixingOnes(tower.hidden_size) for tower in (text, images)]
    return Reading(
        layers={"i": text.num_hidden_layers * scores, "j": images.num_hidden_layers},
        spaces=(
            *visible(**towers.text_sizes(text)),
            *visible(**towers.image_sizes(images, 0, "place") | {"label": config.num_labels}),
            *towers.spaces_of(text, streams[0], "text_model."),
            *towers.spaces_of(images, streams[1], "vision_model."),
            *_pooling(images, OrthogonalFixingOnes(images.hidden_size)),
        ),
        flags={
            "scores": scores,
            "classifier": not scores,
            "pools": pools,
            "both": pools and not scores,
            "unpooled": not pools,
        },
        compared=("joint",) if scores else (),
    )


def _pooling(config: Any, joint: Group) -> tuple[Space, ...]:
    """The spaces of the pooling head; `joint` is the group of what it pools."""
    heads, width = config.num_attention_heads, config.hidden_size
    basis = GeneralLinear(width // heads)
    space = Space("head.pool", feed_forward("gelu", heads))
    return (
        Space("joint", joint),
        space,
        Space("qk.pool", basis, per=space.name, translation="drops"),
        Space("vo.pool", basis, per=space.name, translation="passes"),
        Space("units.pool", feed_forward(config.hidden_act, config.intermediate_size)),
    )


def _pools(config: Any) -> bool:
    return getattr(config, "vision_use_head", True)


def read_text(config: Any, names: Collection[str]) -> Reading:
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(**towers.text_sizes(config)),
            *towers.spaces_of(config, Trivial(config.hidden_size)),
            Space("joint", Trivial(config.projection_size)),
        ),
        flags={},
    )


def read_images(config: Any, names: Collection[str]) -> Reading:
    width = config.hidden_size
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(**towers.image_sizes(config, tokens=0)),
            *towers.spaces_of(config, Trivial(width)),
            *_pooling(config, Trivial(width)),
        ),
        flags={"pools": _pools(config)},
    )


BUFFERS = (r"\.position_ids$",)
FAMILY = Family(
    name="siglip",
    model_types=("siglip",),
    architectures={
        "SiglipModel": Head("image-text", "logit_scale"),
        "SiglipForImageClassification": Head("image-classification", "classifier.weight"),
    },
    table=TABLE,
    norms=NORMS,
    constants=CONSTANTS,
    read=read,
    buffers=BUFFERS,
)
TEXT_FAMILY = Family(
    name="siglip_text_model",
    model_types=("siglip_text_model",),
    architectures={"SiglipTextModel": Head("text-features", "embeddings.token_embedding.weight")},
    table=alone(TEXT, ""),
    norms="",
    read=read_text,
    buffers=(r"position_ids$",),
    stripped="text_model.",
)
IMAGE_FAMILY = Family(
    name="siglip_vision_model",
    model_types=("siglip_vision_model",),
    architectures={"SiglipVisionModel": Head("image-features", "post_layernorm.weight")},
    table=alone(IMAGES, "") + towers.conditional(alone(POOLING, ""), "pools"),
    norms="",
    read=read_images,
    buffers=(r"position_ids$",),
    stripped="vision_model.",
)
