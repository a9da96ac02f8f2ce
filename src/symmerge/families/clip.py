"""CLIP: a text tower, an image tower, and scores of every image for every text.

The function of `CLIPModel` is its scores. They read the space of both projections by inner products
alone, so that it rotates, and the embeddings of an aligned model with it: an index of embeddings
has to be made again. Classes of one tower with its projection show that space, and it stays.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families import towers
from symmerge.families.base import (
    Family,
    Head,
    Reading,
    with_bare,
)
from symmerge.families.spaces import visible
from symmerge.families.towers import alone, beside
from symmerge.symmetry.groups import Orthogonal, OrthogonalFixingOnes, Permutation, Trivial
from symmerge.symmetry.spec import Space

# The norm before the layers leaves its gain on the stream, and reads patches, not rows of a table:
# nothing can absorb that gain, so the stream of images permutes and does not rotate.
IMAGES = (
    """
{t}embeddings.class_embedding                   residual{m}
"""
    + towers.PATCHES
    + """
{t}pre_layrnorm.weight                          residual{m}~
{t}pre_layrnorm.bias                            residual{m}
"""
    + towers.LAYERS
    + towers.LAST
)
SUMS = """
{t}pre_layrnorm <- {t}embeddings.class_embedding {t}embeddings.patch_embedding
    {t}embeddings.position_embedding
"""
TEXT_PROJECTION = "text_projection.weight    joint  residual{m}*\n"
IMAGE_PROJECTION = "visual_projection.weight  joint  residual{m}*\n"
TEXT_NORMS = (
    towers.LAYER_NORMS
    + """
{t}final_layer_norm  -> text_projection
"""
)
TABLE = (
    beside(towers.TEXT + TEXT_PROJECTION, "text_model.", "scores")
    + beside(IMAGES, "vision_model.")
    + beside(IMAGE_PROJECTION, "vision_model.", "scores")
    + """
logit_scale        ()                           if scores
classifier.weight  label  residual.vision*      if classifier
classifier.bias    label                        if classifier
"""
)


def read(config: Any, names: Collection[str]) -> Reading:
    text, images = config.text_config, config.vision_config
    scores = config.architectures[0] == "CLIPModel"
    texts = towers.spaces_of(text, OrthogonalFixingOnes(text.hidden_size), "text_model.")
    return Reading(
        layers={"i": text.num_hidden_layers * scores, "j": images.num_hidden_layers},
        spaces=(
            *visible(**towers.text_sizes(text)),
            *visible(**towers.image_sizes(images, 1, "place") | {"label": config.num_labels}),
            *texts,
            *towers.spaces_of(images, Permutation(images.hidden_size), "vision_model."),
            Space("joint", Orthogonal(config.projection_dim)),
        ),
        flags={"scores": scores, "classifier": not scores},
        end_token=end_token(text) if scores else None,
        compared=("joint",) if scores else (),
    )


def end_token(config: Any) -> int:
    """The token at whose place a text is read."""
    # 2 is what old configs say; there transformers looks for the token of the highest number
    return config.vocab_size - 1 if config.eos_token_id == 2 else config.eos_token_id


def read_text(config: Any, names: Collection[str]) -> Reading:
    stream = OrthogonalFixingOnes(config.hidden_size)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(**towers.text_sizes(config)),
            *towers.spaces_of(config, stream),
            Space("joint", Trivial(config.projection_dim)),
        ),
        flags={},
        end_token=end_token(config),
    )


def read_images(config: Any, names: Collection[str]) -> Reading:
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(**towers.image_sizes(config, tokens=1)),
            *towers.spaces_of(config, Permutation(config.hidden_size)),
            Space("joint", Trivial(config.projection_dim)),
        ),
        flags={},
    )


BUFFERS = (r"\.position_ids$",)
FAMILY = Family(
    name="clip",
    model_types=("clip",),
    architectures={
        "CLIPModel": Head("image-text", "logit_scale"),
        "CLIPForImageClassification": Head("image-classification", "classifier.weight"),
    },
    table=TABLE,
    norms=beside(TEXT_NORMS, "text_model.", "scores"),
    sums=beside(SUMS, "vision_model."),
    read=read,
    buffers=BUFFERS,
)
TEXT_FAMILY = with_bare(
    Family(
        name="clip_text_model",
        model_types=("clip_text_model",),
        architectures={
            "CLIPTextModelWithProjection": Head("text-embedding", "text_projection.weight")
        },
        table=alone(towers.TEXT + TEXT_PROJECTION, "text_model."),
        norms=alone(TEXT_NORMS, "text_model."),
        read=read_text,
        buffers=BUFFERS,
    ),
    "text_model.",
    "text-features",
    ("CLIPTextModel",),
)
IMAGE_FAMILY = with_bare(
    Family(
        name="clip_vision_model",
        model_types=("clip_vision_model",),
        architectures={
            "CLIPVisionModelWithProjection": Head("image-embedding", "visual_projection.weight")
        },
        table=alone(IMAGES + IMAGE_PROJECTION, "vision_model."),
        norms="",
        sums=alone(SUMS, "vision_model."),
        read=read_images,
        buffers=BUFFERS,
    ),
    "vision_model.",
    "image-features",
    ("CLIPVisionModel",),
)
