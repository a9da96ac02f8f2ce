"""BART and mBART: norms on the streams, learned positions, one embedding for both stacks.

While the embeddings of the stacks and the head are tied, one permutation moves both streams;
untied, each stream has its own. mBART has norms before its layers as well, and a last one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    with_bare,
    with_names,
)
from symmerge.families.seq2seq import (
    ALONE,
    ANSWERS,
    CROSS,
    DECODER,
    ENCODED,
    ENCODER,
    FOREIGN,
    GENERATION,
    LABEL,
    LAYERS,
    STREAM,
    attention_at,
    end_token,
    head_flags,
    head_lines,
    head_spaces,
)
from symmerge.families.spaces import (
    feed_forward,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, Permutation
from symmerge.symmetry.spec import Space

_DECODER_TOKENS = "model.decoder.embed_tokens"
OFFSET = 2  # rows of the positions before the first token's
TABLE = (
    """
model.shared.weight                         vocabulary         residual.decoder
model.encoder.embed_tokens.weight           vocabulary         residual.encoder   if apart
model.decoder.embed_tokens.weight           vocabulary         residual.decoder   if apart
model.encoder.embed_positions.weight        position           residual.encoder   if encoder
model.encoder.layernorm_embedding.weight    residual.encoder~                     if encoder
model.encoder.layernorm_embedding.bias      residual.encoder                      if encoder
model.encoder.layer_norm.weight             residual.encoder~                     if encoded_norm
model.encoder.layer_norm.bias               residual.encoder                      if encoded_norm
model.decoder.embed_positions.weight        position           residual.decoder
model.decoder.layernorm_embedding.weight    residual.decoder~
model.decoder.layernorm_embedding.bias      residual.decoder
model.decoder.layer_norm.weight             residual.decoder~                     if last_norm
model.decoder.layer_norm.bias               residual.decoder                      if last_norm
"""
    + LAYERS
    + """
lm_head.weight                              vocabulary         residual.decoder*  if untied_head
final_logits_bias                           one                vocabulary         if logits_bias
"""
    + head_lines(STREAM)
)
# Embeddings are left out: a decoder's positions are added to others than the encoder's.
SUMS = """
model.encoder.layers.{i}.self_attn_layer_norm    <- model.encoder.layers.{i}.self_attn.out_proj
model.encoder.layers.{i}.final_layer_norm        <- model.encoder.layers.{i}.fc2
model.decoder.layers.{j}.self_attn_layer_norm    <- model.decoder.layers.{j}.self_attn.out_proj
model.decoder.layers.{j}.encoder_attn_layer_norm <- model.decoder.layers.{j}.encoder_attn.out_proj
model.decoder.layers.{j}.final_layer_norm        <- model.decoder.layers.{j}.fc2
"""


def read(config: Any, names: Collection[str]) -> Reading:
    heads, width = head_flags(config), config.d_model
    alone, last_norm = config.architectures[0].endswith(ALONE), config.model_type == "mbart"
    untied = not config.tie_word_embeddings
    counts = (config.encoder_attention_heads, config.decoder_attention_heads)
    bases = [GeneralLinear(width // count) for count in counts]
    activation = config.activation_function
    return Reading(
        layers={"i": 0 if alone else config.encoder_layers, "j": config.decoder_layers},
        spaces=(
            *visible(vocabulary=config.vocab_size, one=1),
            *visible(position=config.max_position_embeddings + OFFSET, **{FOREIGN: width}),
            *head_spaces(config),
            *(Space(name, Permutation(width)) for name in ("residual", STREAM, ENCODED)),
            *attention_at(ENCODER, counts[0], bases[0]),
            *attention_at(DECODER, counts[1], bases[1]),
            *attention_at(CROSS, counts[1], bases[1]),
            Space(f"ff.{ENCODER}", feed_forward(activation, config.encoder_ffn_dim)),
            Space(f"ff.{DECODER}", feed_forward(activation, config.decoder_ffn_dim)),
        ),
        flags={
            **heads,
            "key_bias": True,
            "encoder": not alone,
            "apart": untied and not alone,
            "untied": untied,
            "untied_head": untied and heads["lm"],
            "logits_bias": "final_logits_bias" in names,
            "last_norm": last_norm,
            "encoded_norm": last_norm and not alone,
        },
        same=_same(alone, untied),
        reserved_positions=OFFSET,
        end_token=end_token(config),
        encoded_as="encoder_hidden_states" if alone else None,
    )


def _same(alone: bool, untied: bool) -> dict[str, str]:
    """One embedding makes one stream; a decoder alone reads what it is given."""
    if alone:
        return {ENCODED: FOREIGN}
    return {} if untied else dict.fromkeys((STREAM, ENCODED), "residual")


def _family(name: str, stem: str, sums: str) -> Family:
    family = Family(
        name=name,
        model_types=(name,),
        architectures={
            f"{stem}ForSequenceClassification": LABEL,
            f"{stem}ForQuestionAnswering": ANSWERS,
            f"{stem}ForConditionalGeneration": Head(GENERATION, "model.shared.weight"),
        },
        table=TABLE,
        norms="",
        sums=sums,
        read=read,
        ties={
            "lm_head.weight": "model.shared.weight",
            "model.encoder.embed_tokens.weight": "model.shared.weight",
            "model.decoder.embed_tokens.weight": "model.shared.weight",
        },
        buffers=(r"(^|\.)(encoder|decoder)\.version$",),  # of fairseq's files
    )
    words = {f"{stem}{ALONE}": Head("causal-lm", f"{_DECODER_TOKENS}.weight")}
    family = with_names(family, r"model\.shared", _DECODER_TOKENS, words)
    return with_bare(family, "model.", "text-features", (f"{stem}Model",))


FAMILY = _family("bart", "Bart", SUMS)
MBART = _family("mbart", "MBart", "")
