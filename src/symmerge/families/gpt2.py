"""GPT-2: pre-LayerNorm, learned positions, fused QKV in transposed (input, output) matrices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families.base import Reading
from symmerge.families.decoders import (
    DOUBLE,
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
multiple_choice_head.summary.weight   choice       residual*  if choices
multiple_choice_head.summary.bias     choice                  if choices
"""
    + GPT_HEADS
)
NORMS = (
    """
transformer.h.{i}.ln_1    -> transformer.h.{i}.attn.c_attn
transformer.h.{i}.ln_2    -> transformer.h.{i}.mlp.c_fc
"""
    + gpt_last_norm("transformer.ln_f")
    + """
transformer.ln_f          -> multiple_choice_head.summary   if choices
"""
)


def read(config: Any, names: Collection[str]) -> Reading:
    width = config.n_embd
    chooses = config.architectures[0].endswith(DOUBLE)
    if chooses and not config.summary_use_proj:
        raise UnsupportedModel(
            "gpt2: choices without a map of their own (summary_use_proj) show the stream, which no"
            " table describes yet: use a model with one"
        )
    return Reading(
        layers=config.n_layer,
        spaces=gpt_spaces(
            config,
            stream=OrthogonalFixingOnes(width),
            ff=feed_forward(config.activation_function, config.n_inner or 4 * width),
            position=config.n_positions,
            # the class has one label, whatever the config says
            choice=1 if config.summary_proj_to_labels else width,
        ),
        flags={**head_flags(config), "choices": chooses},
    )


FAMILY = decoder(
    "gpt2",
    ("GPT2LMHeadModel",),
    TABLE,
    NORMS,
    read,
    labels=("GPT2" + end for end in (DOUBLE, *TASKS)),
    bare=("GPT2Model",),
    base="transformer.",
    embedding="wte",
    # the hub's oldest checkpoints have no prefix
    renames=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    buffers=(r"\.attn\.(bias|masked_bias)$",),
)
