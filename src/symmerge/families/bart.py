"""BART and mBART: norms on the streams, learned positions, one embedding for both stacks.

While the embeddings of the stacks and the head are tied, one permutation moves both streams;
untied, each stream has its own. mBART has norms before its layers as well, and a last one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import Family, Head, Reading, feed_forward, visible, with_bare
from symmerge.families.seq2seq import (
    CROSS,
    DECODER,
    ENCODED,
    ENCODER,
    GENERATION,
    LAYERS,
    STREAM,
    attention_at,
)
from symmerge.symmetry.groups import GeneralLinear, Permutation, SignedPermutation
from symmerge.symmetry.spec import Space

OFFSET = 2  # rows of the positions before the first token's
TABLE = (
    """
model.shared.weight                         vocabulary         residual.decoder
model.encoder.embed_tokens.weight           vocabulary         residual.encoder   if untied
model.decoder.embed_tokens.weight           vocabulary         residual.decoder   if untied
model.encoder.embed_positions.weight        position           residual.encoder
model.encoder.layernorm_embedding.weight    residual.encoder~
model.encoder.layernorm_embedding.bias      residual.encoder
model.encoder.layer_norm.weight             residual.encoder~                     if last_norm
model.encoder.layer_norm.bias               residual.encoder                      if last_norm
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
qa_outputs.weight                           answer             residual.decoder*  if answers
qa_outputs.bias                             answer                                if answers
classification_head.dense.weight            classifier         residual.decoder*  if classifier
classification_head.dense.bias              classifier                            if classifier
classification_head.out_proj.weight         label              classifier*        if classifier
classification_head.out_proj.bias           label                                 if classifier
"""
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
    architecture, width = config.architectures[0], config.d_model
    generates = architecture.endswith("ForConditionalGeneration")
    classifies = architecture.endswith("ForSequenceClassification")
    untied = not config.tie_word_embeddings
    counts = (config.encoder_attention_heads, config.decoder_attention_heads)
    bases = [GeneralLinear(width // count) for count in counts]
    activation = config.activation_function
    return Reading(
        layers={"i": config.encoder_layers, "j": config.decoder_layers},
        spaces=(
            *visible(vocabulary=config.vocab_size, label=config.num_labels, answer=2, one=1),
            *visible(position=config.max_position_embeddings + OFFSET),
            *(Space(name, Permutation(width)) for name in ("residual", STREAM, ENCODED)),
            *attention_at(ENCODER, counts[0], bases[0]),
            *attention_at(DECODER, counts[1], bases[1]),
            *attention_at(CROSS, counts[1], bases[1]),
            Space(f"ff.{ENCODER}", feed_forward(activation, config.encoder_ffn_dim)),
            Space(f"ff.{DECODER}", feed_forward(activation, config.decoder_ffn_dim)),
            Space("classifier", SignedPermutation(width)),
        ),
        flags={
            "key_bias": True,
            "lm": generates,
            "untied": untied,
            "untied_head": untied and generates,
            "logits_bias": "final_logits_bias" in names,
            "last_norm": config.model_type == "mbart",
            "answers": architecture.endswith("ForQuestionAnswering"),
            "classifier": classifies,
        },
        same={} if untied else dict.fromkeys((STREAM, ENCODED), "residual"),
        reserved_positions=OFFSET,
        end_token=config.eos_token_id if classifies else None,
    )


def _family(name: str, stem: str, sums: str) -> Family:
    family = Family(
        name=name,
        model_types=(name,),
        architectures={
            f"{stem}ForSequenceClassification": Head(
                "text-classification", "classification_head.dense.weight"
            ),
            f"{stem}ForQuestionAnswering": Head("question-answering", "qa_outputs.weight"),
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
    )
    return with_bare(family, "model.", "text-features", (f"{stem}Model",))


FAMILY = _family("bart", "Bart", SUMS)
MBART = _family("mbart", "MBart", "")
