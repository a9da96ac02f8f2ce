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
}
