"""DistilBERT: BERT without token types and pooler, under names of its own."""

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
from symmerge.symmetry.groups import GeneralLinear, Permutation
from symmerge.symmetry.spec import Space

# As in BERT, gains sit on the stream itself. Sinusoidal positions are stored, too, and are read
# from the checkpoint: they move with the stream like learned ones.
TABLE = (
    """
distilbert.embeddings.word_embeddings.weight               vocabulary   residual
distilbert.embeddings.position_embeddings.weight           position     residual
distilbert.embeddings.LayerNorm.weight                     residual~
distilbert.embeddings.LayerNorm.bias                       residual
distilbert.transformer.layer.{i}.attention.q_lin.weight    (head.{i} qk.{i})   residual*
distilbert.transformer.layer.{i}.attention.q_lin.bias      (head.{i} qk.{i})
distilbert.transformer.layer.{i}.attention.k_lin.weight    (head.{i} qk.{i}*)  residual*
distilbert.transformer.layer.{i}.attention.k_lin.bias      (head.{i} qk.{i}*)
distilbert.transformer.layer.{i}.attention.v_lin.weight    (head.{i} vo.{i})   residual*
distilbert.transformer.layer.{i}.attention.v_lin.bias      (head.{i} vo.{i})
distilbert.transformer.layer.{i}.attention.out_lin.weight  residual     (head.{i} vo.{i}*)
distilbert.transformer.layer.{i}.attention.out_lin.bias    residual
distilbert.transformer.layer.{i}.sa_layer_norm.weight      residual~
distilbert.transformer.layer.{i}.sa_layer_norm.bias        residual
distilbert.transformer.layer.{i}.ffn.lin1.weight           ff.{i}       residual*
distilbert.transformer.layer.{i}.ffn.lin1.bias             ff.{i}
distilbert.transformer.layer.{i}.ffn.lin2.weight           residual     ff.{i}*
distilbert.transformer.layer.{i}.ffn.lin2.bias             residual
distilbert.transformer.layer.{i}.output_layer_norm.weight  residual~
distilbert.transformer.layer.{i}.output_layer_norm.bias    residual
vocab_transform.weight                                     transform    residual*    if mlm
vocab_transform.bias                                       transform                 if mlm
vocab_layer_norm.weight                                    transform~                if mlm
vocab_layer_norm.bias                                      transform                 if mlm
vocab_projector.weight                                     vocabulary   transform*   if untied
vocab_projector.bias                                       vocabulary                if mlm
pre_classifier.weight                                      classifier   residual*    if classifier
pre_classifier.bias                                        classifier                if classifier
classifier.weight                                          label        classifier*  if classifier
classifier.bias                                            label                     if classifier
"""
    + encoders.PLACES
)

SUMS = """
distilbert.embeddings.LayerNorm
    <- distilbert.embeddings.word_embeddings distilbert.embeddings.position_embeddings
distilbert.transformer.layer.{i}.sa_layer_norm
    <- distilbert.transformer.layer.{i}.attention.out_lin
distilbert.transformer.layer.{i}.output_layer_norm <- distilbert.transformer.layer.{i}.ffn.lin2
"""


def read(config: Any, names: Collection[str]) -> Reading:
    flags = encoders.head_flags(config.architectures[0])
    basis = GeneralLinear(config.dim // config.n_heads)
    visible_sizes = {
        "vocabulary": config.vocab_size,
        "position": config.max_position_embeddings,
        "label": config.num_labels,
        "answer": 2,
    }
    return Reading(
        layers=config.n_layers,
        spaces=(
            *visible(**visible_sizes),
            Space("residual", Permutation(config.dim)),
            *attention(heads=config.n_heads, qk=basis, vo=basis),
            Space("ff.{i}", feed_forward(config.activation, config.hidden_dim)),
            Space("classifier", feed_forward("relu", config.dim)),  # whatever the layers have
            Space("transform", Permutation(config.dim)),
        ),
        flags={**flags, "untied": flags["mlm"] and not config.tie_word_embeddings},
    )


HEADED = Family(
    name="distilbert",
    model_types=("distilbert",),
    architectures=encoders.heads(
        "DistilBert",
        ForMaskedLM="vocab_transform.weight",
        ForSequenceClassification="pre_classifier.weight",
    ),
    table=TABLE,
    norms="",
    sums=SUMS,
    read=read,
    ties={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    tied_spaces={"transform": "residual"},
    buffers=(r"\.position_ids$",),
)
FAMILY = with_bare(HEADED, "distilbert.", "text-features", ("DistilBertModel",))
