"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT: post-LayerNorm encoders with learned positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from symmerge.families import encoders
from symmerge.families.base import (
    Family,
    Head,
    Reading,
    with_bare,
)
from symmerge.families.spaces import (
    attention,
    feed_forward,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, Group, Permutation, SignedPermutation, Trivial
from symmerge.symmetry.spec import Space

# Gains of a post-LayerNorm model sit on the stream itself: they cannot be folded, so the stream
# cannot rotate.
ENCODER = """
{base}.embeddings.word_embeddings.weight                    vocabulary   residual
{base}.embeddings.position_embeddings.weight                position     residual
{base}.embeddings.token_type_embeddings.weight              type         residual
{base}.embeddings.LayerNorm.weight                          residual~
{base}.embeddings.LayerNorm.bias                            residual
{base}.encoder.layer.{i}.attention.self.query.weight        (head.{i} qk.{i})   residual*
{base}.encoder.layer.{i}.attention.self.query.bias          (head.{i} qk.{i})
{base}.encoder.layer.{i}.attention.self.key.weight          (head.{i} qk.{i}*)  residual*
{base}.encoder.layer.{i}.attention.self.key.bias            (head.{i} qk.{i}*)
{base}.encoder.layer.{i}.attention.self.value.weight        (head.{i} vo.{i})   residual*
{base}.encoder.layer.{i}.attention.self.value.bias          (head.{i} vo.{i})
{base}.encoder.layer.{i}.attention.output.dense.weight      residual     (head.{i} vo.{i}*)
{base}.encoder.layer.{i}.attention.output.dense.bias        residual
{base}.encoder.layer.{i}.attention.output.LayerNorm.weight  residual~
{base}.encoder.layer.{i}.attention.output.LayerNorm.bias    residual
{base}.encoder.layer.{i}.intermediate.dense.weight          ff.{i}       residual*
{base}.encoder.layer.{i}.intermediate.dense.bias            ff.{i}
{base}.encoder.layer.{i}.output.dense.weight                residual     ff.{i}*
{base}.encoder.layer.{i}.output.dense.bias                  residual
{base}.encoder.layer.{i}.output.LayerNorm.weight            residual~
{base}.encoder.layer.{i}.output.LayerNorm.bias              residual
{base}.pooler.dense.weight                                  pooled       residual*  if pooler
{base}.pooler.dense.bias                                    pooled                  if pooler
"""

# What a LayerNorm on the stream reads, and nothing else does: it ignores their mean.
SUMS = """
{base}.embeddings.LayerNorm <- {base}.embeddings.word_embeddings
    {base}.embeddings.position_embeddings {base}.embeddings.token_type_embeddings
{base}.encoder.layer.{i}.attention.output.LayerNorm
    <- {base}.encoder.layer.{i}.attention.output.dense
{base}.encoder.layer.{i}.output.LayerNorm <- {base}.encoder.layer.{i}.output.dense
"""

BERT_HEADS = (
    encoders.WORDS
    + """
cls.seq_relationship.weight                 next         pooled*     if nsp
cls.seq_relationship.bias                   next                     if nsp
"""
    + encoders.POOLED_HEADS
)


Reader = Callable[[Any, Collection[str]], Reading]


def read(config: Any, names: Collection[str]) -> Reading:
    width, heads = config.hidden_size, config.num_attention_heads
    flags = _heads(config.architectures[0], names)
    basis = GeneralLinear(width // heads)
    visible_sizes = {
        "vocabulary": config.vocab_size,
        "position": config.max_position_embeddings,
        "type": getattr(config, "type_vocab_size", 1),
        "label": config.num_labels,
        "next": 2,
        "answer": 2,
    }
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(**visible_sizes),
            Space("residual", Permutation(width)),
            *attention(heads=heads, qk=basis, vo=basis),
            Space("ff.{i}", feed_forward(config.hidden_act, config.intermediate_size)),
            Space("pooled", pooled_group(width, flags)),
            Space("classifier", SignedPermutation(width)),
            Space("transform", Permutation(width)),
        ),
        flags={**flags, "untied": flags["mlm"] and not config.tie_word_embeddings},
        task=encoders.task_of(config),
    )


def read_roberta(config: Any, names: Collection[str]) -> Reading:
    """The same; positions are counted from the one after the padding token's number."""
    return replace(read(config, names), reserved_positions=config.pad_token_id + 1)


def _heads(architecture: str, names: Collection[str]) -> dict[str, bool]:
    return {
        **encoders.head_flags(architecture),
        "mlm": any(name in names for name in ("cls.predictions.bias", "lm_head.dense.weight")),
        "nsp": "cls.seq_relationship.weight" in names,
        "pooler": any(name.endswith("pooler.dense.weight") for name in names),
    }


def pooled_group(width: int, flags: Mapping[str, bool]) -> Group:
    """Group of the pooler's output: visible to users of the encoder unless a head reads it."""
    return SignedPermutation(width) if flags["nsp"] or flags["classifier"] else Trivial(width)


def _family(
    name: str,
    heads: str,
    architectures: dict[str, Head],
    bare: tuple[str, ...],
    decoder: str,
    read: Reader = read,
    relatives: tuple[str, ...] = (),
) -> Family:
    family = Family(
        name=name,
        model_types=(name, *relatives),
        architectures=architectures,
        table=(ENCODER + heads).replace("{base}", name),
        norms="",
        sums=SUMS.replace("{base}", name),
        read=read,
        ties={
            f"{decoder}.weight": f"{name}.embeddings.word_embeddings.weight",
            f"{decoder}.bias": f"{decoder.rpartition('.')[0]}.bias",
        },
        tied_spaces={"transform": "residual"},
        renames=(
            (r"LayerNorm\.gamma$", "LayerNorm.weight"),
            (r"LayerNorm\.beta$", "LayerNorm.bias"),
        ),
        buffers=(r"\.position_ids$", r"\.token_type_ids$"),
    )
    return with_bare(family, f"{name}.", "text-features", bare)


BERT = _family(
    "bert",
    BERT_HEADS,
    {
        "BertForPreTraining": Head("masked-lm", "cls.seq_relationship.weight"),
        **encoders.heads(
            "Bert",
            ForMaskedLM="cls.predictions.bias",
            LMHeadModel="cls.predictions.bias",
            ForNextSentencePrediction="cls.seq_relationship.weight",
            ForSequenceClassification="classifier.weight",
        ),
    },
    ("BertModel",),
    "cls.predictions.decoder",
)
ROBERTA = _family(
    "roberta",
    encoders.ROBERTA_WORDS + encoders.FIRST_HEADS,
    {
        name: head
        for stem in ("Roberta", "XLMRoberta", "Camembert")
        for name, head in encoders.heads(
            stem,
            ForMaskedLM="lm_head.dense.weight",
            ForCausalLM="lm_head.dense.weight",
            ForSequenceClassification="classifier.dense.weight",
        ).items()
    },
    ("RobertaModel", "XLMRobertaModel", "CamembertModel"),
    "lm_head.decoder",
    read_roberta,
    relatives=("xlm-roberta", "camembert"),
)
