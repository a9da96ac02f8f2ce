"""ModernBERT: a pre-LayerNorm encoder with rotary positions, fused QKV and fused gated units."""

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
    gated,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes, Permutation, RotaryPairs
from symmerge.symmetry.spec import Space

# Local and global layers rotate by different angles, but in the same pairs. The first half of Wi
# is the gate: it goes through the activation.
TABLE = """
model.embeddings.tok_embeddings.weight  vocabulary   residual
model.embeddings.norm.weight            residual~
model.embeddings.norm.bias              residual                 if norm_bias
model.layers.{i+1}.attn_norm.weight     residual~
model.layers.{i+1}.attn_norm.bias       residual                 if norm_bias
model.layers.{i}.attn.Wqkv.weight
    ((head.{i} qk.{i}) + (head.{i} qk.{i}*) + (head.{i} vo.{i}))  residual*
model.layers.{i}.attn.Wqkv.bias
    ((head.{i} qk.{i}) + (head.{i} qk.{i}*) + (head.{i} vo.{i}))  if attention_bias
model.layers.{i}.attn.Wo.weight         residual     (head.{i} vo.{i}*)
model.layers.{i}.attn.Wo.bias           residual                 if attention_bias
model.layers.{i}.mlp_norm.weight        residual~
model.layers.{i}.mlp_norm.bias          residual                 if norm_bias
model.layers.{i}.mlp.Wi.weight          (ff.{i}~ + ff.{i})  residual*
model.layers.{i}.mlp.Wi.bias            (ff.{i}~ + ff.{i})       if mlp_bias
model.layers.{i}.mlp.Wo.weight          residual     ff.{i}*
model.layers.{i}.mlp.Wo.bias            residual                 if mlp_bias
model.final_norm.weight                 residual~
model.final_norm.bias                   residual                 if norm_bias
head.dense.weight                       transform    residual*
head.dense.bias                         transform                if head_bias
head.norm.weight                        transform~
head.norm.bias                          transform                if norm_bias
decoder.weight                          vocabulary   transform*  if decoder
decoder.bias                            vocabulary               if decoder_bias
classifier.weight                       label        transform*  if classifier
classifier.bias                         label                    if classifier
"""

# The first layer has no norm before its attention: it reads the output of the embedding's norm.
NORMS = """
model.embeddings.norm            <- model.embeddings.tok_embeddings -> model.layers.0.attn.Wqkv
model.layers.{i+1}.attn_norm     -> model.layers.{i+1}.attn.Wqkv
model.layers.{i}.mlp_norm        -> model.layers.{i}.mlp.Wi
model.final_norm                 -> head.dense
"""


def read(config: Any, names: Collection[str]) -> Reading:
    width, heads = config.hidden_size, config.num_attention_heads
    head_size = width // heads
    qk, vo = RotaryPairs(head_size, rotary=head_size), GeneralLinear(head_size)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(vocabulary=config.vocab_size, label=config.num_labels),
            Space("residual", OrthogonalFixingOnes(width)),
            *attention(heads=heads, qk=qk, vo=vo),
            Space("ff.{i}", gated(config.intermediate_size)),
            Space("transform", Permutation(width)),
        ),
        flags=_flags(config, classifier="classifier.weight" in names),
        epsilon=config.norm_eps,
    )


def _flags(config: Any, classifier: bool) -> dict[str, bool]:
    return {
        "mlm": not classifier,
        "classifier": classifier,
        "untied": classifier or not config.tie_word_embeddings,
        "decoder": not classifier and not config.tie_word_embeddings,
        "decoder_bias": not classifier and config.decoder_bias,
        "head_bias": config.classifier_bias,
        "norm_bias": config.norm_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


HEADED = Family(
    name="modernbert",
    model_types=("modernbert",),
    architectures=encoders.heads(
        "ModernBert",
        ForSequenceClassification="classifier.weight",
        ForMaskedLM="head.dense.weight",
    ),
    table=TABLE,
    norms=NORMS,
    read=read,
    ties={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    tied_spaces={"transform": "residual"},
    buffers=(r"rotary_emb\..*inv_freq$",),
)
FAMILY = with_bare(HEADED, "model.", "text-features", ("ModernBertModel",))
