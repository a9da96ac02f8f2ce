"""Small decoders of further families, for `small_models`."""

from __future__ import annotations

_NO_TOKENS: dict[str, object] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
_DECODER: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    **_NO_TOKENS,
}
_GPT: dict[str, object] = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 101,
    "n_positions": 64,
    **_NO_TOKENS,
}
_GROUPED: dict[str, object] = {**_DECODER, "num_key_value_heads": 2}
_TOP2: dict[str, object] = {"num_experts_per_tok": 2}
_LATENT: dict[str, object] = {
    **_DECODER,
    **_TOP2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
}

DECODERS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2-choices": ("GPT2DoubleHeadsModel", {**_GPT, "n_inner": 96}),
    "llama-answers": ("LlamaForQuestionAnswering", _GROUPED),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_GROUPED,
            "head_dim": 12,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {**_GROUPED, "head_dim": 16, "sliding_window": 8}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {**_GROUPED, "no_rope_layers": [1, 0], "tie_word_embeddings": False},
    ),
    "cohere": ("CohereForCausalLM", {**_GROUPED, "tie_word_embeddings": False}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {
            **_GROUPED,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
    "gptj": ("GPTJForCausalLM", {**_GPT, "n_inner": 96, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **_GPT,
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": 48,
            "intermediate_size": 96,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "tie_word_embeddings": False,
        },
    ),
    "phi": ("PhiForCausalLM", {**_GROUPED, "tie_word_embeddings": False}),
    "falcon": (
        "FalconForCausalLM",
        {
            **_DECODER,
            "ffn_hidden_size": 96,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-mqa": ("FalconForCausalLM", {**_DECODER, "ffn_hidden_size": 96}),
    "falcon-alibi": (
        "FalconForCausalLM",
        {
            **_DECODER,
            "ffn_hidden_size": 96,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, **_NO_TOKENS},
    ),
    "mpt": (
        "MptForCausalLM",
        {
            "d_model": 48,
            "n_layers": 2,
            "n_heads": 4,
            "vocab_size": 101,
            "max_seq_len": 64,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, **_TOP2}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **_GROUPED,
            **_TOP2,
            "num_local_experts": 4,
            "sliding_window": 8,
            "swiglu_limit": 1.0,  # so low that it matters
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            **_GROUPED,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": True,
            **_TOP2,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_GROUPED,
            "head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": True,
            **_TOP2,
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_LATENT, "n_group": 1, "topk_group": 1}),
    "olmoe": (
        "OlmoeForCausalLM",
        {**_GROUPED, "num_experts": 4, "intermediate_size": 32, "attention_bias": True, **_TOP2},
    ),
}
