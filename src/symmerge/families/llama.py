"""Llama, Mistral and Qwen2: pre-RMSNorm, rotary positions, grouped heads, gated units."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symmerge.families.base import (
    Family,
    Head,
    Reading,
    attention,
    check_last_token,
    gated,
    visible,
    with_bare,
)
from symmerge.symmetry.groups import GeneralLinear, Orthogonal, RotaryPairs
from symmerge.symmetry.spec import Space

TABLE = """
model.embed_tokens.weight                         vocabulary   residual
model.layers.{i}.input_layernorm.weight           residual~
model.layers.{i}.self_attn.q_proj.weight          (head.{i} query.{i} qk.{i})  residual*
model.layers.{i}.self_attn.q_proj.bias            (head.{i} query.{i} qk.{i})  if qkv_bias
model.layers.{i}.self_attn.k_proj.weight          (head.{i} qk.{i}*)  residual*
model.layers.{i}.self_attn.k_proj.bias            (head.{i} qk.{i}*)           if qkv_bias
model.layers.{i}.self_attn.v_proj.weight          (head.{i} vo.{i})   residual*
model.layers.{i}.self_attn.v_proj.bias            (head.{i} vo.{i})            if qkv_bias
model.layers.{i}.self_attn.o_proj.weight          residual     (head.{i} query.{i} vo.{i}*)
model.layers.{i}.self_attn.o_proj.bias            residual                     if o_bias
model.layers.{i}.post_attention_layernorm.weight  residual~
model.layers.{i}.mlp.gate_proj.weight             ff.{i}~      residual*
model.layers.{i}.mlp.gate_proj.bias               ff.{i}~                      if mlp_bias
model.layers.{i}.mlp.up_proj.weight               ff.{i}       residual*
model.layers.{i}.mlp.up_proj.bias                 ff.{i}                       if mlp_bias
model.layers.{i}.mlp.down_proj.weight             residual     ff.{i}*
model.layers.{i}.mlp.down_proj.bias               residual                     if mlp_bias
model.norm.weight                                 residual~
lm_head.weight                                    vocabulary   residual*       if untied
score.weight                                      label        residual*       if classifier
"""

CLASSIFIER = "ForSequenceClassification"
NORMS = """
model.layers.{i}.input_layernorm           -> model.layers.{i}.self_attn.q_proj
    model.layers.{i}.self_attn.k_proj model.layers.{i}.self_attn.v_proj
model.layers.{i}.post_attention_layernorm  -> model.layers.{i}.mlp.gate_proj
    model.layers.{i}.mlp.up_proj
model.norm                                 -> lm_head           if lm
model.norm                                 -> score             if classifier
"""


def read(config: Any, names: Collection[str]) -> Reading:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    qk, vo = RotaryPairs(head_size, rotary=head_size), GeneralLinear(head_size)
    attention_bias = getattr(config, "attention_bias", False)
    if classifier := config.architectures[0].endswith(CLASSIFIER):
        check_last_token(config)
    return Reading(
        layers=config.num_hidden_layers,
        spaces=(
            *visible(vocabulary=config.vocab_size, label=config.num_labels),
            Space("residual", Orthogonal(config.hidden_size)),
            *attention(heads=kv_heads, queries=heads // kv_heads, qk=qk, vo=vo),
            Space("ff.{i}", gated(config.intermediate_size)),
        ),
        flags={
            "lm": not classifier,
            "classifier": classifier,
            "untied": not classifier and not config.tie_word_embeddings,
            "qkv_bias": config.model_type == "qwen2" or attention_bias,
            "o_bias": attention_bias,
            "mlp_bias": getattr(config, "mlp_bias", False),
        },
    )


HEADED = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2"),
    architectures={
        **{
            name + CLASSIFIER: Head("text-classification", "score.weight")
            for name in ("Llama", "Mistral", "Qwen2")
        },
        **{
            f"{name}ForCausalLM": Head("causal-lm", "model.embed_tokens.weight")
            for name in ("Llama", "Mistral", "Qwen2")
        },
    },
    table=TABLE,
    norms=NORMS,
    read=read,
    ties={"lm_head.weight": "model.embed_tokens.weight"},
    buffers=(r"rotary_emb\.inv_freq$",),
)
FAMILY = with_bare(HEADED, "model.", "text-features", ("LlamaModel", "MistralModel", "Qwen2Model"))
