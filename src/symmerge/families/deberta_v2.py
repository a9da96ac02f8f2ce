"""DeBERTa-v2 and v3: BERT whose heads compare contents with distances as well.

Distances are embeddings that queries and keys read, by the maps of the contents (v3) or by maps of
their own. In the first case they are in the space of the stream.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import bert, encoders
from symmerge.families.base import (
    Family,
    Reading,
    with_bare,
)
from symmerge.families.spaces import (
    feed_forward,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, Permutation
from symmerge.symmetry.spec import Space

LAYER = "deberta.encoder.layer.{i}.attention.self"
NAMES = {"self.query": "self.query_proj", "self.key": "self.key_proj"}


def _renamed(lines: str) -> str:
    """BERT's lines with the names and conditions of this table; its pooler is part of a head."""
    for old, new in {**NAMES, "self.value": "self.value_proj", "{base}": "deberta"}.items():
        lines = lines.replace(old, new)
    kept = [line for line in lines.splitlines() if "pooler" not in line]
    for part, flag in (("position_embeddings", "positions"), ("token_type_embeddings", "types")):
        kept = [f"{line}  if {flag}" if part in line else line for line in kept]
    return "\n".join(kept)


TABLE = (
    _renamed(bert.ENCODER)
    + f"""
deberta.encoder.rel_embeddings.weight   distance   relative                          if distances
deberta.encoder.LayerNorm.weight        relative~                                    if normed
deberta.encoder.LayerNorm.bias          relative                                     if normed
{LAYER}.pos_key_proj.weight             (head.{{i}} qk.{{i}}*)  relative*            if keys
{LAYER}.pos_key_proj.bias               (head.{{i}} qk.{{i}}*)                       if keys
{LAYER}.pos_query_proj.weight           (head.{{i}} qk.{{i}})   relative*            if queries
{LAYER}.pos_query_proj.bias             (head.{{i}} qk.{{i}})                        if queries
deberta.encoder.conv.conv.weight        residual   residual*    kernel               if conv
deberta.encoder.conv.conv.bias          residual                                     if conv
deberta.encoder.conv.LayerNorm.weight   residual~                                    if conv
deberta.encoder.conv.LayerNorm.bias     residual                                     if conv
pooler.dense.weight                     pooled     residual*                         if classifier
pooler.dense.bias                       pooled                                       if classifier
"""
    + encoders.WORDS
    + encoders.POOLED_HEADS
)
SUMS = """
deberta.embeddings.LayerNorm <- deberta.embeddings.word_embeddings
    deberta.embeddings.position_embeddings deberta.embeddings.token_type_embeddings
deberta.encoder.layer.{i}.attention.output.LayerNorm
    <- deberta.encoder.layer.{i}.attention.output.dense
deberta.encoder.layer.{i}.output.LayerNorm <- deberta.encoder.layer.{i}.output.dense
"""


def read(config: Any, names: Collection[str]) -> Reading:
    _check(config)
    flags = _flags(config)
    reading = bert.read(config, names)
    width, act = config.hidden_size, config.pooler_hidden_act
    own = [space for space in reading.spaces if space.name != "pooled"]
    if "p2c" in _kinds(config):  # distances look at keys, so a constant on them shows
        own = [replace(one, translation=None) if _is_qk(one) else one for one in own]
    kernel = getattr(config, "conv_kernel_size", 0)
    spaces = (
        *own,
        *visible(distance=2 * _span(config), kernel=kernel),
        Space("relative", Permutation(width) if flags["normed"] else GeneralLinear(width)),
        Space("pooled", feed_forward(act, width)),
    )
    shared = getattr(config, "share_att_key", False)
    return replace(
        reading,
        spaces=spaces,
        flags={**reading.flags, **flags},
        same={"relative": "residual"} if shared else {},
    )


def _is_qk(space: Space) -> bool:
    return space.name == "qk.{i}"


def _kinds(config: Any) -> list[str]:
    """Which ways contents and distances are compared."""
    return list(config.pos_att_type or []) if config.relative_attention else []


def _span(config: Any) -> int:
    """Distances to each side that have an embedding."""
    buckets = getattr(config, "position_buckets", -1)
    longest = config.max_relative_positions
    longest = longest if longest >= 1 else config.max_position_embeddings
    return buckets if buckets > 0 else longest


def _flags(config: Any) -> dict[str, bool]:
    distances, kinds = config.relative_attention, _kinds(config)
    own = distances and not getattr(config, "share_att_key", False)
    norms = getattr(config, "norm_rel_ebd", "none").lower().split("|")
    return {
        "positions": config.position_biased_input,
        "types": config.type_vocab_size > 0,
        "distances": distances,
        "normed": "layer_norm" in [norm.strip() for norm in norms],
        "keys": own and "c2p" in kinds,
        "queries": own and "p2c" in kinds,
        "conv": getattr(config, "conv_kernel_size", 0) > 0,
    }


def _check(config: Any) -> None:
    """Refuse what the table does not have."""
    width = config.hidden_size
    head = width // config.num_attention_heads
    odd = {
        "embedding_size": getattr(config, "embedding_size", width) != width,
        "attention_head_size": getattr(config, "attention_head_size", head) != head,
        "conv_groups": getattr(config, "conv_groups", 1) != 1,
        "pooler_hidden_size": config.pooler_hidden_size != width,
        "legacy": not config.legacy and config.architectures[0].endswith("ForMaskedLM"),
    }
    if named := [name for name, is_odd in odd.items() if is_odd]:
        raise UnsupportedModel(
            f"deberta-v2 with {', '.join(named)} other than the usual has no table: use a model"
            " with embeddings as wide as the stream, one group of convolutions, and the head that"
            " transformers calls legacy"
        )


HEADED = Family(
    name="deberta-v2",
    model_types=("deberta-v2",),
    architectures=encoders.heads(
        "DebertaV2",
        ForMaskedLM="cls.predictions.bias",
        ForSequenceClassification="pooler.dense.weight",
    ),
    table=TABLE,
    norms="",
    sums=SUMS,
    read=read,
    ties={
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    tied_spaces={"transform": "residual"},
    renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    buffers=(r"\.position_ids$",),
    # of its pretraining, beside the encoder: heads, and positions that the encoder does not add
    unread=(r"^(lm|mask)_predictions\.", r"embeddings\.position_embeddings\.weight$"),
)
FAMILY = with_bare(HEADED, "deberta.", "text-features", ("DebertaV2Model",))
