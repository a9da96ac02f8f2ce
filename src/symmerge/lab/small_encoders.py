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
_VISION: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
_DINO: dict[str, object] = {**_VISION, "mlp_ratio": 2}

ENCODERS: dict[str, tuple[str, dict[str, object]]] = {
    "camembert": ("CamembertForMaskedLM", _ENCODER),
    "electra": ("ElectraForMaskedLM", {**_ENCODER, "embedding_size": 48}),
    "electra-detector": ("ElectraForPreTraining", {**_ENCODER, "embedding_size": 32}),
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
    "deit": ("DeiTForImageClassification", _VISION),
    "deit-teacher": ("DeiTForImageClassificationWithTeacher", _VISION),
    "ijepa": ("IJepaForImageClassification", _VISION),
    "ijepa-relu": (
        "IJepaForImageClassification",
        {**_VISION, "qkv_bias": False, "hidden_act": "relu"},
    ),
    "beit": (
        "BeitForImageClassification",
        {**_VISION, "use_relative_position_bias": True, "use_mean_pooling": False},
    ),
    "beit-mean": (
        "BeitForImageClassification",
        {
            **_VISION,
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
