"""GPT-2: pre-LayerNorm, learned positions, fused QKV in transposed (input, output) matrices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    attention,
    check_last_token,
    feed_forward,
    visible,
    with_bare,
)
from symmerge.symmetry.groups import GeneralLinear, OrthogonalFixingOnes
from symmerge.symmetry.spec import Space

TABLE = """
transformer.wte.weight                vocabulary   residual
transformer.wpe.weight                position     residual
transformer.h.{i}.ln_1.weight         residual~
transformer.h.{i}.ln_1.bias           residual
transformer.h.{i}.attn.c_attn.weight
    residual*  ((head.{i} qk.{i}) + (head.{i} qk.{i}*) + (head.{i} vo.{i}))
transformer.h.{i}.attn.c_attn.bias    ((head.{i} qk.{i}) + (head.{i} qk.{i}*) + (head.{i} vo.{i}))
transformer.h.{i}.attn.c_proj.weight  (head.{i} vo.{i}*)  residual
transformer.h.{i}.attn.c_proj.bias    residual
transformer.h.{i}.ln_2.weight         residual~
transformer.h.{i}.ln_2.bias           residual
transformer.h.{i}.mlp.c_fc.weight     residual*    ff.{i}
transformer.h.{i}.mlp.c_fc.bias       ff.{i}
transformer.h.{i}.mlp.c_proj.weight   ff.{i}*      residual
transformer.h.{i}.mlp.c_proj.bias     residual
transformer.ln_f.weight               residual~
transformer.ln_f.bias                 residual
lm_head.weight                        vocabulary   residual*  if untied
score.weight                          label        residual*  if classifier
"""

CLASSIFIER = "GPT2ForSequenceClassification"
NORMS = """
transformer.h.{i}.ln_1    -> transformer.h.{i}.attn.c_attn
transformer.h.{i}.ln_2    -> transformer.h.{i}.mlp.c_fc
transformer.ln_f          -> lm_head    if lm
transformer.ln_f          -> score      if classifier
"""


def read(config: Any, names: Collection[str]) -> Reading:
    if classifier := config.architectures[0] == CLASSIFIER:
        check_last_token(config)
    basis = GeneralLinear(config.n_embd // config.n_head)
    units = feed_forward(config.activation_function, config.n_inner or 4 * config.n_embd)
    visible_sizes = {
        "vocabulary": config.vocab_size,
        "position": config.n_positions,
        "label": config.num_labels,
    }
    return Reading(
        layers=config.n_layer,
        spaces=(
            *visible(**visible_sizes),
            Space("residual", OrthogonalFixingOnes(config.n_embd)),
            *attention(heads=config.n_head, qk=basis, vo=basis),
            Space("ff.{i}", units),
        ),
        flags={
            "lm": not classifier,
            "classifier": classifier,
            "untied": not classifier and not config.tie_word_embeddings,
        },
    )


HEADED = Family(
    name="gpt2",
    model_types=("gpt2",),
    architectures={
        CLASSIFIER: Head("text-classification", "score.weight"),
        "GPT2LMHeadModel": Head("causal-lm", "transformer.wte.weight"),
    },
    table=TABLE,
    norms=NORMS,
    read=read,
    ties={"lm_head.weight": "transformer.wte.weight"},
    # the hub's oldest checkpoints have no prefix
    renames=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    buffers=(r"\.attn\.(bias|masked_bias)$",),
)
FAMILY = with_bare(HEADED, "transformer.", "text-features", ("GPT2Model",))
