"""Small encoders of further families, for `small_models`."""

from __future__ import annotations

_ENCODER: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
MODERN: dict[str, object] = {**_ENCODER, "local_attention": 16, **dict.fromkeys(TOKENS, 0)}
_DISTANCES: dict[str, object] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
VISION: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
# Windows of 2 that are shifted, on 8, 4 and 2 places a side.
_STAGES: dict[str, object] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2, 1],
    "num_heads": [4, 4, 4],
    "window_size": 2,
    "mlp_ratio": 2,
}
_DINO: dict[str, object] = {**VISION, "mlp_ratio": 2}

ENCODERS: dict[str, tuple[str, dict[str, object]]] = {
    "swin": ("SwinForImageClassification", {**_STAGES, "num_labels": 5}),
    # 10, 5 and 3 places a side: windows of 3 that are filled up, and neighbours that are not there
    "swin-padded": (
        "SwinForImageClassification",
        {**_STAGES, "image_size": 20, "window_size": 3, "depths": [2, 2, 2], "num_labels": 5},
    ),
    "swin-positions": (
        "SwinForImageClassification",
        {
            **_STAGES,
            "depths": [2, 2],
            "num_heads": [4, 4],
            "num_labels": 5,
            "qkv_bias": False,
            "use_absolute_embeddings": True,
            "hidden_act": "relu",
        },
    ),
    "swin-features": ("SwinModel", _STAGES),
    "camembert": ("CamembertForMaskedLM", _ENCODER),
    "bert-causal": ("BertLMHeadModel", {**_ENCODER, "is_decoder": True}),
    "bert-next": ("BertForNextSentencePrediction", _ENCODER),
    "electra": ("ElectraForMaskedLM", {**_ENCODER, "embedding_size": 48}),
    "electra-detector": ("ElectraForPreTraining", {**_ENCODER, "embedding_size": 32}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",  # as v3
        {
            **_ENCODER,
            **_DISTANCES,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_buckets": 8,
            "position_biased_input": False,
        },
    ),
    "deberta-v2-classifier": (
        "DebertaV2ForSequenceClassification",
        {
            **_ENCODER,
            **_DISTANCES,
            "num_labels": 3,
            "type_vocab_size": 2,
            "conv_kernel_size": 3,
            "conv_act": "gelu",
            "max_relative_positions": 12,
            "pooler_hidden_act": "tanh",
            "hidden_act": "relu",
        },
    ),
    "deberta-v2-features": (
        "DebertaV2Model",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p"]},
    ),
    "mpnet": ("MPNetForMaskedLM", _ENCODER),
    "albert": ("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 32, "num_hidden_layers": 3}),
    "albert-classifier": (
        "AlbertForSequenceClassification",
        {
            **_ENCODER,
            "embedding_size": 48,
            "num_hidden_layers": 4,
            "num_hidden_groups": 2,
            "num_labels": 3,
            "hidden_act": "relu",
        },
    ),
    "roformer-tokens": ("RoFormerForTokenClassification", {**_ENCODER, "num_labels": 3}),
    "roformer-features": ("RoFormerModel", {**_ENCODER, "embedding_size": 32}),
    "modernbert-answers": ("ModernBertForQuestionAnswering", MODERN),
    "modernbert-features": ("ModernBertModel", MODERN),
    "deit": ("DeiTForImageClassification", VISION),
    "deit-teacher": ("DeiTForImageClassificationWithTeacher", VISION),
    "vit_mae": (
        "ViTMAEForPreTraining",
        {
            **VISION,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 3,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 64,
            "mask_ratio": 0.5,
        },
    ),
    "vit_mae-features": ("ViTMAEModel", VISION),
    "ijepa": ("IJepaForImageClassification", VISION),
    "ijepa-relu": (
        "IJepaForImageClassification",
        {**VISION, "qkv_bias": False, "hidden_act": "relu"},
    ),
    "beit": (
        "BeitForImageClassification",
        {**VISION, "use_relative_position_bias": True, "use_mean_pooling": False},
    ),
    "beit-mean": (
        "BeitForImageClassification",
        {
            **VISION,
            "use_mask_token": True,
            "use_absolute_position_embeddings": True,
            "layer_scale_init_value": 0.0,
        },
    ),
    "dinov2": ("Dinov2ForImageClassification", _DINO),
    "dinov2_with_registers": (
        "Dinov2WithRegistersForImageClassification",
        {**_DINO, "use_swiglu_ffn": True, "mlp_ratio": 3},
    ),
}
