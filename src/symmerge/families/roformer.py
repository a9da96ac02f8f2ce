"""RoFormer: a post-LayerNorm encoder with interleaved rotary pairs.

The embedding may be of a different width from the stream; then it is projected.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families import encoders
from symmerge.families.base import (
    Family,
    Reading,
    with_bare,
)
from symmerge.families.spaces import (
    attention,
    feed_forward,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes, Permutation, RotaryPairs
from symmerge.symmetry.spec import Space

# The sines and cosines are stored, though never trained: visible spaces keep them as they are.
TABLE = (
    """
roformer.embeddings.word_embeddings.weight                    vocabulary   embedding
roformer.embeddings.token_type_embeddings.weight              type         embedding
roformer.embeddings.LayerNorm.weight                          embedding~
roformer.embeddings.LayerNorm.bias                            embedding
roformer.embeddings_project.weight                            residual     embedding*  if projected
roformer.embeddings_project.bias                              residual                 if projected
roformer.encoder.embed_positions.weight                       position     angle
roformer.encoder.layer.{i}.attention.self.query.weight        (head.{i} qk.{i})   residual*
roformer.encoder.layer.{i}.attention.self.query.bias          (head.{i} qk.{i})
roformer.encoder.layer.{i}.attention.self.key.weight          (head.{i} qk.{i}*)  residual*
roformer.encoder.layer.{i}.attention.self.key.bias            (head.{i} qk.{i}*)
roformer.encoder.layer.{i}.attention.self.value.weight        (head.{i} vo.{i})   residual*
roformer.encoder.layer.{i}.attention.self.value.bias          (head.{i} vo.{i})
roformer.encoder.layer.{i}.attention.output.dense.weight      residual     (head.{i} vo.{i}*)
roformer.encoder.layer.{i}.attention.output.dense.bias        residual
roformer.encoder.layer.{i}.attention.output.LayerNorm.weight  residual~
roformer.encoder.layer.{i}.attention.output.LayerNorm.bias    residual
roformer.encoder.layer.{i}.intermediate.dense.weight          ff.{i}       residual*
roformer.encoder.layer.{i}.intermediate.dense.bias            ff.{i}
roformer.encoder.layer.{i}.output.dense.weight                residual     ff.{i}*
roformer.encoder.layer.{i}.output.dense.bias                  residual
roformer.encoder.layer.{i}.output.LayerNorm.weight            residual~
roformer.encoder.layer.{i}.output.LayerNorm.bias              residual
"""
    + encoders.WORDS
    + encoders.FIRST_HEADS
)

# The gain of a projected embedding folds into the projection. All others sit on the stream.
NORMS = """
roformer.embeddings.LayerNorm    -> roformer.embeddings_project    if projected
"""
SUMS = """
roformer.embeddings.LayerNorm
    <- roformer.embeddings.word_embeddings roformer.embeddings.token_type_embeddings
roformer.encoder.layer.{i}.attention.output.LayerNorm
    <- roformer.encoder.layer.{i}.attention.output.dense
roformer.encoder.layer.{i}.output.LayerNorm <- roformer.encoder.layer.{i}.output.dense
"""


def read(config: Any, names: Collection[str]) -> Reading:
    width, heads = config.hidden_size, config.num_attention_heads
    head_size = width // heads
    rotary = RotaryPairs(head_size, rotary=head_size, layout="interleaved")
    values = rotary if config.rotary_value else GeneralLinear(head_size)
    projected, flags = config.embedding_size != width, encoders.head_flags(config.architectures[0])
    visible_sizes = {
        "vocabulary": config.vocab_size,
        "type": config.type_vocab_size,
        "label": config.num_labels,
        "answer": 2,
        "position": config.max_position_embeddings,
        "angle": head_size,
    }
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(**visible_sizes),
            Space("embedding", OrthogonalFixingOnes(config.embedding_size)),
            Space("residual", Permutation(width)),
            *attention(heads=heads, qk=rotary, vo=values),
            Space("ff.{i}", feed_forward(config.hidden_act, config.intermediate_size)),
            Space("classifier", feed_forward(config.hidden_act, width)),
            Space("transform", Permutation(config.embedding_size)),
        ),
        flags={
            **flags,
            "projected": projected,
            "untied": flags["mlm"] and not config.tie_word_embeddings,
        },
        same={} if projected else {"embedding": "residual"},
        task=encoders.task_of(config),
    )


HEADED = Family(
    name="roformer",
    model_types=("roformer",),
    architectures=encoders.heads(
        "RoFormer",
        ForMaskedLM="cls.predictions.bias",
        ForCausalLM="cls.predictions.bias",
        ForSequenceClassification="classifier.dense.weight",
    ),
    table=TABLE,
    norms=NORMS,
    sums=SUMS,
    read=read,
    ties={
        "cls.predictions.decoder.weight": "roformer.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    tied_spaces={"transform": "embedding"},
)
FAMILY = with_bare(HEADED, "roformer.", "text-features", ("RoFormerModel",))
