"""GPT-J: parallel blocks that share one LayerNorm, partial rotary positions, pairs side by side."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import Reading
from symmerge.families.decoders import GPT_HEADS, decoder, gpt_last_norm, gpt_spaces, head_flags
from symmerge.families.spaces import feed_forward
from symmerge.symmetry.groups import OrthogonalFixingOnes, RotaryPairs

TABLE = (
    """
transformer.wte.weight                  vocabulary   residual
transformer.h.{i}.ln_1.weight           residual~
transformer.h.{i}.ln_1.bias             residual
transformer.h.{i}.attn.q_proj.weight    (head.{i} qk.{i})   residual*
transformer.h.{i}.attn.k_proj.weight    (head.{i} qk.{i}*)  residual*
transformer.h.{i}.attn.v_proj.weight    (head.{i} vo.{i})   residual*
transformer.h.{i}.attn.out_proj.weight  residual     (head.{i} vo.{i}*)
transformer.h.{i}.mlp.fc_in.weight      ff.{i}       residual*
transformer.h.{i}.mlp.fc_in.bias        ff.{i}
transformer.h.{i}.mlp.fc_out.weight     residual     ff.{i}*
transformer.h.{i}.mlp.fc_out.bias       residual
transformer.ln_f.weight                 residual~
transformer.ln_f.bias                   residual
lm_head.bias                            vocabulary   if lm
"""
    + GPT_HEADS
)
# Attention has no biases: the shift stays in the norm, divided by its gain.
NORMS = """
transformer.h.{i}.ln_1 -> transformer.h.{i}.attn.q_proj transformer.h.{i}.attn.k_proj
    transformer.h.{i}.attn.v_proj transformer.h.{i}.mlp.fc_in
""" + gpt_last_norm("transformer.ln_f")


def read(config: Any, names: Collection[str]) -> Reading:
    width = config.n_embd
    size = width // config.n_head
    rotary = size if config.rotary_dim is None else config.rotary_dim
    return Reading(
        layers=config.n_layer,
        spaces=gpt_spaces(
            config,
            stream=OrthogonalFixingOnes(width),
            qk=RotaryPairs(size, rotary=rotary, layout="interleaved"),
            ff=feed_forward(config.activation_function, config.n_inner or 4 * width),
        ),
        flags=head_flags(config),
    )


FAMILY = decoder(
    "gptj",
    ("GPTJ",),
    TABLE,
    NORMS,
    read,
    labels=("GPTJForSequenceClassification", "GPTJForQuestionAnswering"),
    bare=("GPTJModel",),
    base="transformer.",
    embedding="wte",
    buffers=(r"\.attn\.(bias|masked_bias|embed_positions)$",),
)
