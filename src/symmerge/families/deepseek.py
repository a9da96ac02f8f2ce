"""DeepSeek V2 and V3: attention through low-rank latents, and experts after dense layers.

Queries, and keys with values, pass through a latent with an RMSNorm of its own: a stream that
rotates once the gain is folded. A head adds two products of queries and keys. One has no positions,
and its basis is free; the other turns with the position, and all heads share its key.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.errors import UnsupportedModel
from symmerge.families import experts, llama
from symmerge.families.base import Reading
from symmerge.families.decoders import CLASSIFIER, TOKENS, decoder, head_flags
from symmerge.families.spaces import (
    gated,
    visible,
)
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    Permutation,
    RotaryPairs,
)
from symmerge.symmetry.spec import Space

ATTENTION = """
model.layers.{i}.self_attn.q_proj.weight     (head.{i} (qk.{i} + rotary.{i}))  residual*  if direct
model.layers.{i}.self_attn.q_a_proj.weight                 latent.q.{i}   residual*   if reduced
model.layers.{i}.self_attn.q_a_proj.bias                   latent.q.{i}               if q_bias
model.layers.{i}.self_attn.q_a_layernorm.weight            latent.q.{i}~              if reduced
model.layers.{i}.self_attn.q_b_proj.weight
    (head.{i} (qk.{i} + rotary.{i}))  latent.q.{i}*                                   if reduced
model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight  (latent.kv.{i} + rotary.{i}*)  residual*
model.layers.{i}.self_attn.kv_a_proj_with_mqa.bias    (latent.kv.{i} + rotary.{i}*)   if bias
model.layers.{i}.self_attn.kv_a_layernorm.weight           latent.kv.{i}~
model.layers.{i}.self_attn.kv_b_proj.weight  (head.{i} (qk.{i}* + vo.{i}))  latent.kv.{i}*
model.layers.{i}.self_attn.o_proj.weight                   residual       (head.{i} vo.{i}*)
model.layers.{i}.self_attn.o_proj.bias                     residual                   if bias
"""
DENSE = """
model.layers.{i}.mlp.gate_proj.weight                      ff.{i}~        residual*   if dense
model.layers.{i}.mlp.gate_proj.bias                        ff.{i}~                if dense_bias
model.layers.{i}.mlp.up_proj.weight                        ff.{i}         residual*   if dense
model.layers.{i}.mlp.up_proj.bias                          ff.{i}                 if dense_bias
model.layers.{i}.mlp.down_proj.weight                      residual       ff.{i}*     if dense
model.layers.{i}.mlp.down_proj.bias                        residual               if dense_bias
"""
EXPERTS = """
model.layers.{i}.mlp.gate.weight                           expert.{i}     residual*   if sparse
model.layers.{i}.mlp.gate.e_score_correction_bias          expert.{i}            if corrected
model.layers.{i}.mlp.experts.gate_up_proj  expert.{i}  (ff.{i}~ + ff.{i})  residual*  if sparse
model.layers.{i}.mlp.experts.down_proj     expert.{i}   residual   ff.{i}*            if sparse
model.layers.{i}.mlp.shared_experts.gate_proj.weight       shared.{i}~    residual*   if sparse
model.layers.{i}.mlp.shared_experts.gate_proj.bias         shared.{i}~           if sparse_bias
model.layers.{i}.mlp.shared_experts.up_proj.weight         shared.{i}     residual*   if sparse
model.layers.{i}.mlp.shared_experts.up_proj.bias           shared.{i}            if sparse_bias
model.layers.{i}.mlp.shared_experts.down_proj.weight       residual       shared.{i}* if sparse
model.layers.{i}.mlp.shared_experts.down_proj.bias         residual              if sparse_bias
"""
TABLE = llama.TABLE.replace(llama.ATTENTION, ATTENTION).replace(llama.GATED, DENSE + EXPERTS)
NORMS = (
    """
model.layers.{i}.input_layernorm  -> model.layers.{i}.self_attn.q_proj
    model.layers.{i}.self_attn.kv_a_proj_with_mqa  if direct
model.layers.{i}.input_layernorm  -> model.layers.{i}.self_attn.q_a_proj
    model.layers.{i}.self_attn.kv_a_proj_with_mqa  if reduced
model.layers.{i}.self_attn.q_a_layernorm   -> model.layers.{i}.self_attn.q_b_proj  if reduced
model.layers.{i}.self_attn.kv_a_layernorm  -> model.layers.{i}.self_attn.kv_b_proj
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate_proj
    model.layers.{i}.mlp.up_proj  if dense
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate
    model.layers.{i}.mlp.experts.gate_up_proj model.layers.{i}.mlp.shared_experts.gate_proj
    model.layers.{i}.mlp.shared_experts.up_proj  if sparse
"""
    + llama.LAST_NORM
)


def read(config: Any, names: Collection[str]) -> Reading:
    _check(config)
    third = config.model_type == "deepseek_v3"
    depth = config.num_hidden_layers
    dense = range(min(config.first_k_dense_replace, depth))
    sparse = range(len(dense), depth)
    reduced, bias = config.q_lora_rank is not None, config.attention_bias
    mlp_bias = getattr(config, "mlp_bias", False)
    return Reading(
        layers=depth,
        spaces=_spaces(config, sparse),
        flags={
            **head_flags(config),
            "direct": not reduced,
            "reduced": reduced,
            "bias": bias,
            "q_bias": reduced and bias,
        },
        only={
            "dense": dense,
            "dense_bias": dense if mlp_bias else (),
            "sparse": sparse,
            "sparse_bias": sparse if mlp_bias else (),
            "corrected": sparse if third else (),
        },
    )


def _spaces(config: Any, sparse: Collection[int]) -> tuple[Space, ...]:
    turned = config.qk_rope_head_dim
    halves = config.model_type == "deepseek_v3" and not config.rope_interleave
    pairs = RotaryPairs(turned, turned, "halves" if halves else "interleaved")
    units = gated(config.moe_intermediate_size)
    return (
        *visible(vocabulary=config.vocab_size, label=config.num_labels),
        Space("residual", Orthogonal(config.hidden_size)),
        Space("latent.q.{i}", Orthogonal(config.q_lora_rank or 0)),
        Space("latent.kv.{i}", Orthogonal(config.kv_lora_rank)),
        Space("rotary.{i}", pairs),
        Space("head.{i}", Permutation(config.num_attention_heads)),
        Space("qk.{i}", GeneralLinear(config.qk_nope_head_dim), per="head.{i}"),
        Space("vo.{i}", GeneralLinear(config.v_head_dim), per="head.{i}", translation="passes"),
        Space("ff.{i}", gated(config.intermediate_size)),
        *(Space(f"ff.{i}", units, per=f"expert.{i}") for i in sparse),
        Space("expert.{i}", _expert_group(config)),
        Space("shared.{i}", gated(config.moe_intermediate_size * config.n_shared_experts)),
    )


def _expert_group(config: Any) -> Group:
    """Experts change places freely, unless only some groups of them may be chosen."""
    if config.model_type == "deepseek_v2" and config.topk_method == "greedy":
        return Permutation(config.n_routed_experts)
    if config.topk_group < config.n_group:
        raise UnsupportedModel(
            f"{config.model_type} with topk_group {config.topk_group} of n_group {config.n_group}"
            " chooses experts by groups, which no table describes yet: use a model without groups"
        )
    return Permutation(config.n_routed_experts)


def _check(config: Any) -> None:
    """Refuse what the stock class cannot run, or what no table describes."""
    if config.num_key_value_heads != config.num_attention_heads:
        raise UnsupportedModel(
            f"{config.model_type} with num_key_value_heads {config.num_key_value_heads} of"
            f" {config.num_attention_heads} heads: every head has keys of its own, made from the"
            " latent: set it to the number of heads"
        )
    if config.qk_rope_head_dim % 2:
        raise UnsupportedModel(
            f"{config.model_type} with qk_rope_head_dim {config.qk_rope_head_dim}: positions turn"
            " pairs of coordinates: use an even number"
        )


V3 = decoder(
    "deepseek_v3",
    ("DeepseekV3",),
    TABLE,
    NORMS,
    read,
    labels=("DeepseekV3" + CLASSIFIER, "DeepseekV3" + TOKENS),
    bare=("DeepseekV3Model",),
    parts=experts.QWEN_PARTS,
)
