"""GPT-Neo: pre-LayerNorm, learned positions, every second layer with a window."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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
transformer.wte.weight                            vocabulary   residual
transformer.wpe.weight                            position     residual
transformer.h.{i}.ln_1.weight                     residual~
transformer.h.{i}.ln_1.bias                       residual
transformer.h.{i}.attn.attention.q_proj.weight    (head.{i} qk.{i})   residual*
transformer.h.{i}.attn.attention.k_proj.weight    (head.{i} qk.{i}*)  residual*
transformer.h.{i}.attn.attention.v_proj.weight    (head.{i} vo.{i})   residual*
transformer.h.{i}.attn.attention.out_proj.weight  residual     (head.{i} vo.{i}*)
transformer.h.{i}.attn.attention.out_proj.bias    residual
transformer.h.{i}.ln_2.weight                     residual~
transformer.h.{i}.ln_2.bias                       residual
transformer.h.{i}.mlp.c_fc.weight                 ff.{i}       residual*
transformer.h.{i}.mlp.c_fc.bias                   ff.{i}
transformer.h.{i}.mlp.c_proj.weight               residual     ff.{i}*
transformer.h.{i}.mlp.c_proj.bias                 residual
transformer.ln_f.weight                           residual~
transformer.ln_f.bias                             residual
"""
    + GPT_HEADS
)
# Queries, keys and values have no biases: the shift stays in the norm, divided by its gain.
NORMS = """
transformer.h.{i}.ln_1    -> transformer.h.{i}.attn.attention.q_proj
    transformer.h.{i}.attn.attention.k_proj transformer.h.{i}.attn.attention.v_proj
transformer.h.{i}.ln_2    -> transformer.h.{i}.mlp.c_fc
""" + gpt_last_norm("transformer.ln_f")


def read(config: Any, names: Collection[str]) -> Reading:
    width = config.hidden_size
    units = config.intermediate_size or 4 * width
    return Reading(
        layers=config.num_layers,
        spaces=gpt_spaces(
            config,
            stream=OrthogonalFixingOnes(width),
            ff=feed_forward(config.activation_function, units),
            position=config.max_position_embeddings,
        ),
        flags=head_flags(config),
    )


FAMILY = decoder(
    "gpt_neo",
    ("GPTNeo",),
    TABLE,
    NORMS,
    read,
    labels=("GPTNeo" + end for end in TASKS),
    bare=("GPTNeoModel",),
    base="transformer.",
    embedding="wte",
    buffers=(r"\.attn\.attention\.(bias|masked_bias)$",),
)
