"""Small models of two towers, and towers alone, for `small_models`."""

from __future__ import annotations

from symmerge.lab.small_encoders import VISION

_TEXTS: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 24,
    "pad_token_id": 1,
    "bos_token_id": 99,
    "eos_token_id": 100,
}
_IMAGES: dict[str, object] = {name: size for name, size in VISION.items() if name != "num_labels"}
# towers of other depths and widths than each other's
_NARROW: dict[str, object] = {
    **_TEXTS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "eos_token_id": 2,
    "hidden_act": "relu",
}
_PROJECTED = {"projection_dim": 40}

TOWERS: dict[str, tuple[str, dict[str, object]]] = {
    "clip": ("CLIPModel", {"text_config": _NARROW, "vision_config": _IMAGES, **_PROJECTED}),
    "clip-classifier": (
        "CLIPForImageClassification",
        {"text_config": _TEXTS, "vision_config": _IMAGES, "num_labels": 5},
    ),
    "clip_text_model": ("CLIPTextModelWithProjection", {**_TEXTS, **_PROJECTED}),
    "clip-text-features": ("CLIPTextModel", _TEXTS),
    "clip_vision_model": ("CLIPVisionModelWithProjection", {**_IMAGES, **_PROJECTED}),
    "clip-image-features": ("CLIPVisionModel", _IMAGES),
    "siglip": (
        "SiglipModel",
        {"text_config": {**_NARROW, "projection_size": 48}, "vision_config": _IMAGES},
    ),
    "siglip-classifier": (
        "SiglipForImageClassification",
        {"text_config": _TEXTS, "vision_config": _IMAGES, "num_labels": 5},
    ),
    "siglip_text_model": ("SiglipTextModel", {**_TEXTS, "projection_size": 40}),
    "siglip_vision_model": ("SiglipVisionModel", _IMAGES),
}
