"""ALBERT: one layer that is run many times, and a factorised embedding.

The layers share their tensors, and so their spaces: {i} counts the groups of layers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import bert, encoders
from symmerge.families.base import Family, Head, Reading, with_bare
from symmerge.families.spaces import factorised
from symmerge.symmetry.groups import OrthogonalFixingOnes, Permutation
from symmerge.symmetry.spec import Space

LAYER = "albert.encoder.albert_layer_groups.{i}.albert_layers.0."
NAMES = {
    "{base}.encoder.layer.{i}.attention.self.": LAYER + "attention.",
    "{base}.encoder.layer.{i}.attention.output.": LAYER + "attention.",
    "{base}.encoder.layer.{i}.intermediate.dense": LAYER + "ffn",
    "{base}.encoder.layer.{i}.output.dense": LAYER + "ffn_output",
    "{base}.encoder.layer.{i}.output.LayerNorm": LAYER + "full_layer_layer_norm",
    "{base}.pooler.dense": "albert.pooler",
    "{base}": "albert",
}


def _renamed(lines: str) -> str:
    for old, new in NAMES.items():
        lines = lines.replace(old, new)
    return lines


TABLE = (
    factorised(_renamed(bert.ENCODER))
    + """
albert.encoder.embedding_hidden_mapping_in.weight  residual     embedding*
albert.encoder.embedding_hidden_mapping_in.bias    residual
predictions.dense.weight                           transform    residual*   if mlm
predictions.dense.bias                             transform                if mlm
predictions.LayerNorm.weight                       transform~               if mlm
predictions.LayerNorm.bias                         transform                if mlm
predictions.decoder.weight                         vocabulary   transform*  if untied
predictions.bias                                   vocabulary               if mlm
predictions.decoder.bias                           vocabulary               if untied
sop_classifier.classifier.weight                   label        pooled*     if nsp
sop_classifier.classifier.bias                     label                    if nsp
"""
    + encoders.POOLED_HEADS
)
# The mapping takes the gain of the embedding's norm. All others sit on the stream.
NORMS = """
albert.embeddings.LayerNorm    -> albert.encoder.embedding_hidden_mapping_in
"""


def read(config: Any, names: Collection[str]) -> Reading:
    if config.inner_group_num != 1:
        raise UnsupportedModel(
            f"albert with inner_group_num {config.inner_group_num} has groups of several layers,"
            " which no table describes yet: use a model with one"
        )
    reading = bert.read(config, names)
    architecture = config.architectures[0]
    mlm = architecture.endswith(("ForMaskedLM", "ForPreTraining"))
    flags = {
        **reading.flags,
        "mlm": mlm,
        "nsp": architecture.endswith("ForPreTraining"),
        "pooler": "albert.pooler.weight" in names or "pooler.weight" in names,
        "untied": mlm and not config.tie_word_embeddings,
    }
    spaces = (
        *reading.spaces,
        Space("embedding", OrthogonalFixingOnes(config.embedding_size)),
        Space("transform", Permutation(config.embedding_size)),
        Space("pooled", bert.pooled_group(config.hidden_size, flags)),
    )
    return replace(reading, layers=config.num_hidden_groups, spaces=spaces, flags=flags)


HEADED = Family(
    name="albert",
    model_types=("albert",),
    architectures={
        "AlbertForPreTraining": Head("masked-lm", "sop_classifier.classifier.weight"),
        **encoders.heads(
            "Albert",
            ForMaskedLM="predictions.bias",
            ForSequenceClassification="classifier.weight",
        ),
    },
    table=TABLE,
    norms=NORMS,
    sums=_renamed(bert.SUMS),
    read=read,
    ties={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    tied_spaces={"transform": "embedding"},
    buffers=(r"\.position_ids$", r"\.token_type_ids$"),
)
FAMILY = with_bare(HEADED, "albert.", "text-features", ("AlbertModel",))
