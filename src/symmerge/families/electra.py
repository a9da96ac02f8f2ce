"""ELECTRA: BERT with a factorised embedding, and a head that tells replaced tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from symmerge.families import bert, encoders
from symmerge.families.base import (
    Family,
    Head,
    Reading,
    with_bare,
)
from symmerge.families.spaces import factorised, feed_forward
from symmerge.symmetry.groups import OrthogonalFixingOnes, Permutation, Trivial
from symmerge.symmetry.spec import Space

TABLE = (
    factorised(bert.ENCODER.replace("{base}", "electra"))
    + """
electra.embeddings_project.weight                  residual     embedding*   if projected
electra.embeddings_project.bias                    residual                  if projected
generator_predictions.dense.weight                 transform    residual*    if mlm
generator_predictions.dense.bias                   transform                 if mlm
generator_predictions.LayerNorm.weight             transform~                if mlm
generator_predictions.LayerNorm.bias               transform                 if mlm
generator_lm_head.weight                           vocabulary   transform*   if untied
generator_lm_head.bias                             vocabulary                if mlm
discriminator_predictions.dense.weight             detector     residual*    if detects
discriminator_predictions.dense.bias               detector                  if detects
discriminator_predictions.dense_prediction.weight  one          detector*    if detects
discriminator_predictions.dense_prediction.bias    one                       if detects
"""
    + encoders.FIRST_HEADS
)
# The gain of a projected embedding folds into the projection. All others sit on the stream.
NORMS = """
electra.embeddings.LayerNorm    -> electra.embeddings_project    if projected
"""


def read(config: Any, names: Collection[str]) -> Reading:
    reading = bert.read(config, names)
    width, size = config.hidden_size, config.embedding_size
    architecture = config.architectures[0]
    projected, mlm = size != width, encoders.head_flags(architecture)["mlm"]
    flags = {
        **reading.flags,
        "mlm": mlm,
        "untied": mlm and not config.tie_word_embeddings,
        "detects": architecture.endswith("ForPreTraining"),
        "projected": projected,
        "pooler": False,
    }
    spaces = (
        *reading.spaces,
        Space("embedding", OrthogonalFixingOnes(size)),
        Space("transform", Permutation(size)),
        Space("detector", feed_forward(config.hidden_act, width)),
        Space("classifier", feed_forward("gelu", width)),  # whatever the layers have
        Space("one", Trivial(1)),
    )
    same = {} if projected else {"embedding": "residual"}
    return replace(reading, spaces=spaces, flags=flags, same=same)


HEADED = Family(
    name="electra",
    model_types=("electra",),
    architectures={
        "ElectraForPreTraining": Head(
            "replaced-token-detection", "discriminator_predictions.dense.weight"
        ),
        **encoders.heads(
            "Electra",
            ForMaskedLM="generator_predictions.dense.weight",
            ForCausalLM="generator_predictions.dense.weight",
            ForSequenceClassification="classifier.dense.weight",
        ),
    },
    table=TABLE,
    norms=NORMS,
    sums=bert.SUMS.replace("{base}", "electra"),
    read=read,
    ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    tied_spaces={"transform": "embedding"},
    buffers=(r"\.position_ids$", r"\.token_type_ids$"),
)
FAMILY = with_bare(HEADED, "electra.", "text-features", ("ElectraModel",))
