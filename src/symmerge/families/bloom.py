"""BLOOM: slopes of heads (ALiBi), QKV fused head by head, a norm on the embedding."""

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
transformer.word_embeddings.weight                     vocabulary   residual
transformer.word_embeddings_layernorm.weight           residual~
transformer.word_embeddings_layernorm.bias             residual
transformer.h.{i}.input_layernorm.weight               residual~
transformer.h.{i}.input_layernorm.bias                 residual
transformer.h.{i}.self_attention.query_key_value.weight
    (head.{i} (qk.{i} + qk.{i}* + vo.{i}))  residual*
transformer.h.{i}.self_attention.query_key_value.bias
    (head.{i} (qk.{i} + qk.{i}* + vo.{i}))
transformer.h.{i}.self_attention.dense.weight          residual     (head.{i} vo.{i}*)
transformer.h.{i}.self_attention.dense.bias            residual
transformer.h.{i}.post_attention_layernorm.weight      residual~
transformer.h.{i}.post_attention_layernorm.bias        residual
transformer.h.{i}.mlp.dense_h_to_4h.weight             ff.{i}       residual*
transformer.h.{i}.mlp.dense_h_to_4h.bias               ff.{i}
transformer.h.{i}.mlp.dense_4h_to_h.weight             residual     ff.{i}*
transformer.h.{i}.mlp.dense_4h_to_h.bias               residual
transformer.ln_f.weight                                residual~
transformer.ln_f.bias                                  residual
"""
    + GPT_HEADS
)
# Every map that reads the stream has a norm before it: none reads that of the embedding.
NORMS = """
transformer.word_embeddings_layernorm         <- transformer.word_embeddings ->
transformer.h.{i}.input_layernorm             -> transformer.h.{i}.self_attention.query_key_value
transformer.h.{i}.post_attention_layernorm    -> transformer.h.{i}.mlp.dense_h_to_4h
""" + gpt_last_norm("transformer.ln_f")


def read(config: Any, names: Collection[str]) -> Reading:
    if config.apply_residual_connection_post_layernorm:
        raise UnsupportedModel(
            "bloom with apply_residual_connection_post_layernorm adds the output of its norms to"
            " the stream, which no table describes yet: use a model without it"
        )
    width = config.hidden_size
    return Reading(
        layers=config.n_layer,
        spaces=gpt_spaces(
            config,
            stream=OrthogonalFixingOnes(width),
            ff=feed_forward("gelu", 4 * width),
            slopes=True,
        ),
        flags=head_flags(config),
        epsilon=config.layer_norm_epsilon,
    )


FAMILY = decoder(
    "bloom",
    ("Bloom",),
    TABLE,
    NORMS,
    read,
    labels=("Bloom" + end for end in TASKS),
    bare=("BloomModel",),
    base="transformer.",
    embedding="word_embeddings",
    # the hub's checkpoints have no prefix
    renames=((r"^(word_embeddings|word_embeddings_layernorm|h|ln_f)\.", r"transformer.\1."),),
)
