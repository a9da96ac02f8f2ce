"""OPT: learned positions that begin at the third row, ReLU, and norms before the layers or after.

Refused: projected embeddings, norms without weights, and a last norm that was taken out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families.base import (
    Family,
    Head,
    Reading,
    check_last_token,
    with_bare,
)
from symmerge.families.spaces import (
    attention,
    feed_forward,
    visible,
)
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes, Permutation
from symmerge.symmetry.spec import Space

OFFSET = 2  # rows of the positions before the first token's
TABLE = """
model.decoder.embed_tokens.weight                     vocabulary   residual
model.decoder.embed_positions.weight                  position     residual
model.decoder.layers.{i}.self_attn_layer_norm.weight  residual~
model.decoder.layers.{i}.self_attn_layer_norm.bias    residual
model.decoder.layers.{i}.self_attn.q_proj.weight      (head.{i} qk.{i})   residual*
model.decoder.layers.{i}.self_attn.q_proj.bias        (head.{i} qk.{i})     if biases
model.decoder.layers.{i}.self_attn.k_proj.weight      (head.{i} qk.{i}*)  residual*
model.decoder.layers.{i}.self_attn.k_proj.bias        (head.{i} qk.{i}*)    if biases
model.decoder.layers.{i}.self_attn.v_proj.weight      (head.{i} vo.{i})   residual*
model.decoder.layers.{i}.self_attn.v_proj.bias        (head.{i} vo.{i})     if biases
model.decoder.layers.{i}.self_attn.out_proj.weight    residual     (head.{i} vo.{i}*)
model.decoder.layers.{i}.self_attn.out_proj.bias      residual              if biases
model.decoder.layers.{i}.final_layer_norm.weight      residual~
model.decoder.layers.{i}.final_layer_norm.bias        residual
model.decoder.layers.{i}.fc1.weight                   ff.{i}       residual*
model.decoder.layers.{i}.fc1.bias                     ff.{i}                if biases
model.decoder.layers.{i}.fc2.weight                   residual     ff.{i}*
model.decoder.layers.{i}.fc2.bias                     residual              if biases
model.decoder.final_layer_norm.weight                 residual~             if before
model.decoder.final_layer_norm.bias                   residual              if before
lm_head.weight                                        vocabulary   residual*  if untied
score.weight                                          label        residual*  if classifier
qa_outputs.weight                                     answer       residual*  if answers
qa_outputs.bias                                       answer                if answers
"""

# Norms before the layers fold into what reads them; norms after them sit on the stream itself.
NORMS = """
model.decoder.layers.{i}.self_attn_layer_norm  -> model.decoder.layers.{i}.self_attn.q_proj
    model.decoder.layers.{i}.self_attn.k_proj model.decoder.layers.{i}.self_attn.v_proj  if before
model.decoder.layers.{i}.final_layer_norm      -> model.decoder.layers.{i}.fc1           if before
model.decoder.final_layer_norm                 -> lm_head      if before_lm
model.decoder.final_layer_norm                 -> score        if before_classifier
model.decoder.final_layer_norm                 -> qa_outputs   if before_answers
"""
SUMS = """
model.decoder.layers.{i}.self_attn_layer_norm
    <- model.decoder.layers.{i}.self_attn.out_proj                       if after
model.decoder.layers.{i}.final_layer_norm <- model.decoder.layers.{i}.fc2  if after
"""


def read(config: Any, names: Collection[str]) -> Reading:
    _check(config)
    width, heads = config.hidden_size, config.num_attention_heads
    basis, before = GeneralLinear(width // heads), config.do_layer_norm_before
    visible_sizes = {
        "vocabulary": config.vocab_size,
        "position": config.max_position_embeddings + OFFSET,
        "label": config.num_labels,
        "answer": 2,
    }
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(**visible_sizes),
            Space("residual", OrthogonalFixingOnes(width) if before else Permutation(width)),
            *attention(heads=heads, qk=basis, vo=basis),
            Space("ff.{i}", feed_forward(config.activation_function, config.ffn_dim)),
        ),
        flags=_flags(config),
        reserved_positions=OFFSET,
    )


def _flags(config: Any) -> dict[str, bool]:
    architecture, before = config.architectures[0], config.do_layer_norm_before
    heads = {
        "lm": architecture.endswith("ForCausalLM"),
        "classifier": architecture.endswith("ForSequenceClassification"),
        "answers": architecture.endswith("ForQuestionAnswering"),
    }
    return {
        **heads,
        **{f"before_{head}": before and there for head, there in heads.items()},
        "before": before,
        "after": not before,
        "biases": config.enable_bias,
        "untied": heads["lm"] and not config.tie_word_embeddings,
    }


def _check(config: Any) -> None:
    """Refuse what the table does not have."""
    if config.word_embed_proj_dim != config.hidden_size:
        raise UnsupportedModel(
            f"opt: embeddings of {config.word_embed_proj_dim} that are projected to"
            f" {config.hidden_size} (word_embed_proj_dim) have no table; use a model without"
        )
    if not config.layer_norm_elementwise_affine or config._remove_final_layer_norm:
        raise UnsupportedModel(
            "opt: norms without weights (layer_norm_elementwise_affine, _remove_final_layer_norm)"
            " have no table; use a model with the usual ones"
        )
    if config.architectures[0].endswith("ForSequenceClassification"):
        check_last_token(config)


HEADED = Family(
    name="opt",
    model_types=("opt",),
    architectures={
        "OPTForSequenceClassification": Head("text-classification", "score.weight"),
        "OPTForQuestionAnswering": Head("question-answering", "qa_outputs.weight"),
        "OPTForCausalLM": Head("causal-lm", "model.decoder.embed_tokens.weight"),
    },
    table=TABLE,
    norms=NORMS,
    sums=SUMS,
    read=read,
    ties={"lm_head.weight": "model.decoder.embed_tokens.weight"},
    # the hub's oldest checkpoints have no prefix
    renames=((r"^decoder\.", "model.decoder."),),
)
FAMILY = with_bare(HEADED, "model.", "text-features", ("OPTModel",))
