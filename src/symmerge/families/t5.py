"""T5, mT5 and UMT5: RMSNorm before the layers, distances instead of positions, no biases.

Both stacks read one embedding, so that one rotation moves both streams. A table of distances adds
a number to each head's scores; in T5 and mT5 all layers of a stack share it, and so the order of
their heads. Attention is not divided by the root of its width.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    with_bare,
    with_names,
)
from symmerge.families.seq2seq import (
    ANSWERS,
    CROSS,
    DECODER,
    ENCODER,
    GENERATION,
    LABEL,
    attention_at,
    end_token,
    head_flags,
    head_lines,
    head_spaces,
)
from symmerge.families.spaces import (
    feed_forward,
    gated,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, Orthogonal
from symmerge.symmetry.spec import Space

ATTENTION = """
{layer}.layer_norm.weight   residual~
{layer}.{kind}.q.weight     ({head} qk.{at})    residual*
{layer}.{kind}.k.weight     ({head} qk.{at}*)   residual*
{layer}.{kind}.v.weight     ({head} vo.{at})    residual*
{layer}.{kind}.o.weight     residual            ({head} vo.{at}*)
"""
UNITS = """
{layer}.layer_norm.weight             residual~
{layer}.DenseReluDense.wi.weight      ff.{at}     residual*   if plain
{layer}.DenseReluDense.wi_0.weight    ff.{at}~    residual*   if gated
{layer}.DenseReluDense.wi_1.weight    ff.{at}     residual*   if gated
{layer}.DenseReluDense.wo.weight      residual    ff.{at}*
"""
HEADS = """
lm_head.weight      vocabulary   residual*   if untied
classifier.weight   label        residual*   if tokens
classifier.bias     label                    if tokens
""" + head_lines("residual")
DISTANCES = "SelfAttention.relative_attention_bias.weight"
# Where the layers of a stack share their distances, its first layer holds them.
SHARED = f"""
encoder.block.0.layer.0.{DISTANCES}   bucket   head.encoder~
decoder.block.0.layer.0.{DISTANCES}   bucket   head.decoder~   if decoder
"""
OWN = f"""
encoder.block.{{i}}.layer.0.{DISTANCES}   bucket   head.encoder.{{i}}~
decoder.block.{{j}}.layer.0.{DISTANCES}   bucket   head.decoder.{{j}}~
"""


def _attention(layer: str, kind: str, at: str, head: str) -> str:
    lines = ATTENTION.replace("{layer}", layer).replace("{kind}", kind)
    return lines.replace("{head}", head).replace("{at}", at)


def _units(layer: str, at: str) -> str:
    return UNITS.replace("{layer}", layer).replace("{at}", at)


def _table(encoder: str, decoder: str, distances: str) -> str:
    """The table, with these orders of the heads in each stack."""
    first, second = "encoder.block.{i}.layer", "decoder.block.{j}.layer"
    return (
        "shared.weight  vocabulary  residual\n"
        + _attention(f"{first}.0", "SelfAttention", ENCODER, encoder)
        + _units(f"{first}.1", ENCODER)
        + "encoder.final_layer_norm.weight  residual~\n"
        + _attention(f"{second}.0", "SelfAttention", DECODER, decoder)
        + _attention(f"{second}.1", "EncDecAttention", CROSS, f"head.{CROSS}")
        + _units(f"{second}.2", DECODER)
        + "decoder.final_layer_norm.weight  residual~  if decoder\n"
        + distances
        + HEADS
    )


# Every layer of the decoder reads the encoder's last norm, its keys and values alone.
NORMS = """
encoder.block.{i}.layer.0.layer_norm  -> encoder.block.{i}.layer.0.SelfAttention.q
    encoder.block.{i}.layer.0.SelfAttention.k encoder.block.{i}.layer.0.SelfAttention.v
encoder.block.{i}.layer.1.layer_norm  -> encoder.block.{i}.layer.1.DenseReluDense.wi     if plain
encoder.block.{i}.layer.1.layer_norm  -> encoder.block.{i}.layer.1.DenseReluDense.wi_0
    encoder.block.{i}.layer.1.DenseReluDense.wi_1                                        if gated
encoder.final_layer_norm              -> decoder.block.{j}.layer.1.EncDecAttention.k
    decoder.block.{j}.layer.1.EncDecAttention.v
decoder.block.{j}.layer.0.layer_norm  -> decoder.block.{j}.layer.0.SelfAttention.q
    decoder.block.{j}.layer.0.SelfAttention.k decoder.block.{j}.layer.0.SelfAttention.v
decoder.block.{j}.layer.1.layer_norm  -> decoder.block.{j}.layer.1.EncDecAttention.q
decoder.block.{j}.layer.2.layer_norm  -> decoder.block.{j}.layer.2.DenseReluDense.wi     if plain
decoder.block.{j}.layer.2.layer_norm  -> decoder.block.{j}.layer.2.DenseReluDense.wi_0
    decoder.block.{j}.layer.2.DenseReluDense.wi_1                                        if gated
decoder.final_layer_norm              -> lm_head      if lm
decoder.final_layer_norm              -> qa_outputs   if answers
decoder.final_layer_norm              -> classification_head.dense  if classifier
encoder.final_layer_norm              -> classifier   if tokens
"""
# Classes by label have the whole of a bare model inside, under this name.
INNER = (r"(shared|encoder|decoder)\.", r"transformer.\1.")
TOKENS = Head("token-classification", "classifier.weight")


def read(config: Any, names: Collection[str], *, orders: tuple[str, str]) -> Reading:
    """`orders`: the spaces of the heads of each stack, one for all layers or one for each."""
    architecture, heads = config.architectures[0], config.num_heads
    tokens = architecture.endswith("ForTokenClassification")
    decoder = not (tokens or architecture.endswith("EncoderModel"))
    basis = GeneralLinear(config.d_kv)
    units = gated(config.d_ff)
    if not config.is_gated_act:
        units = feed_forward(config.dense_act_fn, config.d_ff)
    return Reading(
        layers={"i": config.num_layers, "j": config.num_decoder_layers if decoder else 0},
        spaces=(
            *visible(vocabulary=config.vocab_size, bucket=config.relative_attention_num_buckets),
            *head_spaces(config),
            Space("residual", Orthogonal(config.d_model)),
            *attention_at(ENCODER, heads, basis, orders[0]),
            *attention_at(DECODER, heads, basis, orders[1]),
            *attention_at(CROSS, heads, basis),
            Space(f"ff.{ENCODER}", units),
            Space(f"ff.{DECODER}", units),
        ),
        flags={
            "plain": not config.is_gated_act,
            "gated": config.is_gated_act,
            "decoder": decoder,
            **head_flags(config),
            "tokens": tokens,
            # the config says that they are tied, whether or not they are
            "untied": "lm_head.weight" in names,
        },
        epsilon=config.layer_norm_epsilon,
        end_token=end_token(config),
    )


def _family(name: str, stems: dict[str, str], orders: tuple[str, str], distances: str) -> Family:
    """A family of these model types, each with the stem of its classes."""

    def classes(**heads: Head) -> dict[str, Head]:
        return {f"{stem}{kind}": head for stem in stems.values() for kind, head in heads.items()}

    family = Family(
        name=name,
        model_types=tuple(stems),
        architectures=classes(
            ForConditionalGeneration=Head(GENERATION, "decoder.final_layer_norm.weight"),
            ForQuestionAnswering=ANSWERS,
        ),
        table=_table(f"head.{orders[0]}", f"head.{orders[1]}", distances),
        norms=NORMS,
        read=partial(read, orders=orders),
        ties={"lm_head.weight": "shared.weight"},
        copies={
            f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")
        },
        # the first T5s have it, and no class reads it
        buffers=(r"EncDecAttention\.relative_attention_bias\.weight$",),
        explicit=("scale_decoder_outputs",),
    )
    labels = classes(ForSequenceClassification=LABEL, ForTokenClassification=TOKENS)
    bare = [f"{stem}{kind}" for stem in stems.values() for kind in ("Model", "EncoderModel")]
    return with_bare(with_names(family, *INNER, labels), "", "text-features", bare)


FAMILY = _family("t5", {"t5": "T5", "mt5": "MT5"}, ("encoder", "decoder"), SHARED)
UMT5 = _family("umt5", {"umt5": "UMT5"}, (ENCODER, DECODER), OWN)
