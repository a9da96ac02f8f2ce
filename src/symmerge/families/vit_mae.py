"""ViT-MAE: ViT sees a part of the patches, and a decoder of its own width draws the others.

Which patches are hidden is random, and decided by noise that may be given.
"""

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
from symmerge.families.spaces import visible
from symmerge.families.towers import marked, tower_spaces
from symmerge.symmetry.groups import OrthogonalFixingOnes
from symmerge.symmetry.spec import Space

ENCODER, DECODER = (".encoder", "i"), (".decoder", "j")


def _placed(lines: str, layer: str, mark: tuple[str, str]) -> str:
    return marked(lines.replace("{layer}", layer).replace("{base}", "vit"), *mark)


TABLE = (
    _placed(
        vit.PATCHES
        + "{base}.embeddings.position_embeddings  one position residual\n"
        + vit.LAYER
        + """
{base}.layernorm.weight                 residual~
{base}.layernorm.bias                   residual
""",
        "vit.layers.{i}",
        ENCODER,
    )
    + """
decoder.decoder_embed.weight            residual.decoder   residual.encoder*
decoder.decoder_embed.bias              residual.decoder
"""
    + _placed(
        """
decoder.mask_token                      one one      residual
decoder.decoder_pos_embed               one position residual
"""
        + vit.LAYER
        + """
decoder.decoder_norm.weight             residual~
decoder.decoder_norm.bias               residual
decoder.decoder_pred.weight             pixel        residual*
decoder.decoder_pred.bias               pixel
""",
        "decoder.decoder_layers.{i}",
        DECODER,
    )
)
NORMS = (
    _placed(vit.LAYER_NORMS, "vit.layers.{i}", ENCODER)
    + _placed(vit.LAYER_NORMS, "decoder.decoder_layers.{i}", DECODER)
    + """
vit.layernorm         -> decoder.decoder_embed
decoder.decoder_norm  -> decoder.decoder_pred
"""
)


def read(config: Any, names: Collection[str]) -> Reading:
    sizes = vit.patch_sizes(config)
    pixels = sizes["patch_height"] * sizes["patch_width"] * sizes["channel"]
    return Reading(
        layers={"i": config.num_hidden_layers, "j": config.decoder_num_hidden_layers},
        spaces=(
            *visible(**sizes, pixel=pixels),
            *_stack(config, "", ENCODER),
            *_stack(config, "decoder_", DECODER),
        ),
        flags={"plain": True, "qkv_bias": config.qkv_bias, "key_bias": config.qkv_bias},
        noise=sizes["position"] - 1,
    )


def _stack(config: Any, prefix: str, mark: tuple[str, str]) -> tuple[Space, ...]:
    """The spaces of one of both stacks; settings of the decoder have a prefix."""
    width, heads, units = (
        getattr(config, prefix + name)
        for name in ("hidden_size", "num_attention_heads", "intermediate_size")
    )
    return tower_spaces(
        OrthogonalFixingOnes(width), heads, vit.feed_forward(config.hidden_act, units), *mark
    )


HEADED = Family(
    name="vit_mae",
    model_types=("vit_mae",),
    architectures={"ViTMAEForPreTraining": Head("image-reconstruction", "decoder.mask_token")},
    table=TABLE,
    norms=NORMS,
    read=read,
    # transformers 5 writes the decoder's layers so, and reads them again
    renames=(
        (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
        *vit.renames("vit"),
    ),
)
FAMILY = with_bare(HEADED, "vit.", "image-features", ("ViTMAEModel",))
