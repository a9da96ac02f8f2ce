"""MPNet: BERT with relative positions that all layers share, and so do their heads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from symmerge.families import bert, encoders
from symmerge.families.base import (
    Family,
    Reading,
    with_bare,
)
from symmerge.families.spaces import visible
from symmerge.symmetry.groups import GeneralLinear, Permutation
from symmerge.symmetry.spec import Space

NAMES = {
    "attention.self.query": "attention.attn.q",
    "attention.self.key": "attention.attn.k",
    "attention.self.value": "attention.attn.v",
    "attention.output.dense": "attention.attn.o",
    "attention.output.LayerNorm": "attention.LayerNorm",
    "head.{i}": "head.0",
    "{base}": "mpnet",
}


def _renamed(lines: str) -> str:
    for old, new in NAMES.items():
        lines = lines.replace(old, new)
    return "\n".join(line for line in lines.splitlines() if "token_type" not in line)


# A bucket of distances adds one number for each head, the same in every layer.
TABLE = (
    _renamed(bert.ENCODER)
    + """
mpnet.encoder.relative_attention_bias.weight    bucket   head.0~
"""
    + encoders.ROBERTA_WORDS
    + encoders.FIRST_HEADS
)
SUMS = """
mpnet.embeddings.LayerNorm <- mpnet.embeddings.word_embeddings mpnet.embeddings.position_embeddings
mpnet.encoder.layer.{i}.attention.LayerNorm <- mpnet.encoder.layer.{i}.attention.attn.o
mpnet.encoder.layer.{i}.output.LayerNorm <- mpnet.encoder.layer.{i}.output.dense
"""
PADDING = 1  # whatever the config says, positions are counted from here


def read(config: Any, names: Collection[str]) -> Reading:
    reading = bert.read(config, names)
    heads = config.num_attention_heads
    basis = GeneralLinear(config.hidden_size // heads)
    own = [space for space in reading.spaces if space.per is None and space.name != "head.{i}"]
    spaces = (
        *own,
        *visible(bucket=config.relative_attention_num_buckets),
        Space("head.0", Permutation(heads)),
        Space("qk.{i}", basis, per="head.0", translation="drops"),
        Space("vo.{i}", basis, per="head.0", translation="passes"),
    )
    return replace(reading, spaces=spaces, reserved_positions=PADDING + 1)


HEADED = Family(
    name="mpnet",
    model_types=("mpnet",),
    architectures=encoders.heads(
        "MPNet",
        ForMaskedLM="lm_head.dense.weight",
        ForSequenceClassification="classifier.dense.weight",
    ),
    table=TABLE,
    norms="",
    sums=SUMS,
    read=read,
    ties={
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    tied_spaces={"transform": "residual"},
    buffers=(r"\.position_ids$",),
)
FAMILY = with_bare(HEADED, "mpnet.", "text-features", ("MPNetModel",))
