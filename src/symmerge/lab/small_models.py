"""Small stock models of every family, with random gains and biases.

Freshly initialised gains and biases are ones and zeros, which hide mistakes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmerge.lab.small_decoders import DECODERS
from symmerge.lab.small_encoders import ENCODERS, MODERN, TOKENS
from symmerge.lab.small_seq2seq import SEQ2SEQ, finish
from symmerge.lab.small_towers import TOWERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BODY: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
_TEXT: dict[str, object] = {**_BODY, "vocab_size": 101, "max_position_embeddings": 64}
_GPT2: dict[str, object] = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 96,
    "vocab_size": 101,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_OPT: dict[str, object] = {**_TEXT, "ffn_dim": 96}
_DISTILLED: dict[str, object] = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 96,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
_HALF_ROTARY: dict[str, object] = {
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "rope_type": "default",
}
_MULTIPLIERS: dict[str, object] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
_DECODER: dict[str, object] = {**_TEXT, **dict.fromkeys(TOKENS[:3], 0)}
_ROTARY_VIT: dict[str, object] = {
    **_BODY,
    "image_size": 16,
    "patch_size": 4,
    "layerscale_value": 0.5,
}
_MODERN_BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")

# Class and config of families, and of every variant that changes a table or its groups.
SMALL: dict[str, tuple[str, dict[str, object]]] = {
    "bert": ("BertForMaskedLM", _TEXT),
    "bert-untied": ("BertForMaskedLM", {**_TEXT, "tie_word_embeddings": False}),
    "bert-pretraining": ("BertForPreTraining", _TEXT),
    "bert-classifier": (
        "BertForSequenceClassification",
        {**_TEXT, "num_labels": 3, "hidden_act": "relu"},
    ),
    "bert-tokens": ("BertForTokenClassification", {**_TEXT, "num_labels": 3}),
    "bert-answers": ("BertForQuestionAnswering", _TEXT),
    "bert-features": ("BertModel", _TEXT),
    "roberta": ("RobertaForMaskedLM", _TEXT),
    "roberta-classifier": ("RobertaForSequenceClassification", {**_TEXT, "num_labels": 3}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", _TEXT),
    "distilbert": ("DistilBertForMaskedLM", _DISTILLED),
    "distilbert-classifier": (
        "DistilBertForSequenceClassification",
        {**_DISTILLED, "num_labels": 3, "activation": "relu", "sinusoidal_pos_embds": True},
    ),
    "roformer": ("RoFormerForMaskedLM", _TEXT),
    "roformer-classifier": (
        "RoFormerForSequenceClassification",
        {**_TEXT, "num_labels": 3, "embedding_size": 32, "rotary_value": True},
    ),
    "modernbert": ("ModernBertForMaskedLM", MODERN),
    "modernbert-classifier": (
        "ModernBertForSequenceClassification",
        {**MODERN, "num_labels": 3, **dict.fromkeys(_MODERN_BIASES, True)},
    ),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2-untied": (
        "GPT2LMHeadModel",
        {**_GPT2, "tie_word_embeddings": False, "activation_function": "relu"},
    ),
    "gpt2-classifier": (
        "GPT2ForSequenceClassification",
        {**_GPT2, "num_labels": 3, "pad_token_id": 0},
    ),
    "gpt2-features": ("GPT2Model", _GPT2),
    "vit": (
        "ViTForImageClassification",
        {**_BODY, "image_size": 16, "patch_size": 4, "num_labels": 5},
    ),
    "vit-features": ("ViTModel", {**_BODY, "image_size": 16, "patch_size": 4}),
    "vit-tanh": (
        "ViTForImageClassification",
        {
            **_BODY,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 5,
            "qkv_bias": False,
            "hidden_act": "tanh",
        },
    ),
    "dinov3": ("DINOv3ViTModel", {**_ROTARY_VIT, "key_bias": True}),
    "dinov3-classifier": (
        "DINOv3ViTModel",
        {
            **_ROTARY_VIT,
            "num_labels": 5,
            "problem_type": "single_label_classification",
            "num_register_tokens": 4,
            "use_gated_mlp": True,
        },
    ),
    "llama": ("LlamaForCausalLM", {**_TEXT, "num_key_value_heads": 2}),
    "llama-mqa": (
        "LlamaForCausalLM",
        {
            **_TEXT,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama-classifier": (
        "LlamaForSequenceClassification",
        {**_TEXT, "num_key_value_heads": 2, "num_labels": 3, "pad_token_id": 0},
    ),
    "llama-features": ("LlamaModel", {**_TEXT, "num_key_value_heads": 2}),
    "mistral": (
        "MistralForCausalLM",
        {**_TEXT, "num_key_value_heads": 4, "head_dim": 16, "sliding_window": 8},
    ),
    "qwen2": ("Qwen2ForCausalLM", {**_TEXT, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "opt": ("OPTForCausalLM", _OPT),
    "opt-untied": (
        "OPTForCausalLM",
        {**_OPT, "tie_word_embeddings": False, "enable_bias": False, "activation_function": "gelu"},
    ),
    "opt-post-norm": ("OPTForCausalLM", {**_OPT, "do_layer_norm_before": False}),
    "neox": (
        "GPTNeoXForCausalLM",
        {
            **_TEXT,
            "rope_parameters": _HALF_ROTARY,
        },
    ),
    "neox-sequential": (
        "GPTNeoXForCausalLM",
        {**_TEXT, "use_parallel_residual": False, "attention_bias": False},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}),
    "qwen3-tied": (
        "Qwen3ForCausalLM",
        {
            **_TEXT,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {**_DECODER, "num_key_value_heads": 2, "rope_parameters": _HALF_ROTARY},
    ),
    "phi3-tied": (
        "Phi3ForCausalLM",
        {**_DECODER, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "granite": ("GraniteForCausalLM", {**_TEXT, **_MULTIPLIERS, "num_key_value_heads": 2}),
    "granite-tied": (
        "GraniteForCausalLM",
        {
            **_TEXT,
            **_MULTIPLIERS,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {**_DECODER, "num_key_value_heads": 2, "sliding_window": 8, "tie_word_embeddings": False},
    ),
    "starcoder2-tied": (
        "Starcoder2ForCausalLM",
        {**_DECODER, "num_key_value_heads": 1, "use_bias": False, "hidden_act": "relu"},
    ),
    "stablelm": (
        "StableLmForCausalLM",
        {**_TEXT, "num_key_value_heads": 2, "rope_parameters": _HALF_ROTARY, "use_qkv_bias": True},
    ),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        {
            **_TEXT,
            "num_key_value_heads": 4,
            "rope_parameters": _HALF_ROTARY,
            "use_parallel_residual": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {**_DECODER, "num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            **_DECODER,
            "sliding_window": 8,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    # New in kind: norms on both sides, experts, slopes; heads of all layers, one layer, two means,
    # two towers, stages.
    **{name: DECODERS[name] for name in ("gemma3", "mixtral", "bloom")},
    **{name: ENCODERS[name] for name in ("mpnet", "albert", "dinov2", "swin")},
    **{name: SEQ2SEQ[name] for name in ("t5", "bart")},
    "clip": TOWERS["clip"],
}
EVERY: dict[str, tuple[str, dict[str, object]]] = {
    **SMALL,
    **DECODERS,
    **ENCODERS,
    **SEQ2SEQ,
    **TOWERS,
}
"""All; the tests of the tables run every one of them, others one of each kind (`SMALL`)."""


def small_model(
    name: str,
    *,
    kind: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> PreTrainedModel:
    """A model of `EVERY`, determined by its seed; `changes` override its config.

    `kind` is another class that takes this config.
    """
    import transformers

    architecture, config = EVERY[name]
    stock = getattr(transformers, kind or architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = stock(stock.config_class(**{**config, **changes}))
    finish(name, model, seed)
    perturb(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def perturb(model: PreTrainedModel, seed: int = 0) -> None:
    """Add noise: gains, biases and embeddings vary as after training; matrices keep scale.

    What is not trained stays, unless it is zero: that hides mistakes as well.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in filter(lambda one: one.requires_grad or not one.any(), model.parameters()):
        scale = 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
