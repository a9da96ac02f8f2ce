"""MPT: slopes of heads (ALiBi), fused QKV, LayerNorms without a shift, no biases."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families.base import Reading
from symmerge.families.decoders import (
    GPT_HEADS,
    TASKS,
    decoder,
    gpt_last_norm,
    gpt_spaces,
    head_flags,
)
from symmerge.families.spaces import feed_forward
from symmerge.symmetry.groups import OrthogonalFixingOnes

TABLE = (
    """
transformer.wte.weight                     vocabulary   residual
transformer.blocks.{i}.norm_1.weight       residual~
transformer.blocks.{i}.attn.Wqkv.weight
    ((head.{i} qk.{i}) + (head.{i} qk.{i}*) + (head.{i} vo.{i}))  residual*
transformer.blocks.{i}.attn.out_proj.weight  residual   (head.{i} vo.{i}*)
transformer.blocks.{i}.norm_2.weight       residual~
transformer.blocks.{i}.ffn.up_proj.weight    ff.{i}     residual*
transformer.blocks.{i}.ffn.down_proj.weight  residual   ff.{i}*
transformer.norm_f.weight                  residual~
"""
    + GPT_HEADS
)
NORMS = """
transformer.blocks.{i}.norm_1    -> transformer.blocks.{i}.attn.Wqkv
transformer.blocks.{i}.norm_2    -> transformer.blocks.{i}.ffn.up_proj
""" + gpt_last_norm("transformer.norm_f")


def read(config: Any, names: Collection[str]) -> Reading:
    if config.attn_config.clip_qkv:
        raise UnsupportedModel(
            "mpt with clip_qkv limits every coordinate of queries, keys and values, which leaves"
            " them no symmetry that a table describes yet: use a model without it"
        )
    return Reading(
        layers=config.n_layers,
        spaces=gpt_spaces(
            config,
            stream=OrthogonalFixingOnes(config.d_model),
            ff=feed_forward("gelu", 4 * config.d_model),
            slopes=True,
        ),
        flags=head_flags(config),
    )


FAMILY = decoder(
    "mpt",
    ("Mpt",),
    TABLE,
    NORMS,
    read,
    labels=("Mpt" + end for end in TASKS),
    bare=("MptModel",),
    base="transformer.",
    embedding="wte",
)
