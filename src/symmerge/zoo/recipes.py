"""What is trained, on what and how: the small models of the demonstration, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from symmerge.errors import MismatchError


@dataclass(frozen=True)
class Schedule:
    """How long and how fast: AdamW, a linear warm-up, then half a cosine down to nothing."""

    steps: int
    batch: int
    rate: float
    warmup: int
    decay: float
    clip: float = 1.0


@dataclass(frozen=True)
class TrainingRecipe:
    """A stock transformers class with its config, the task and the embedded data it learns, and a schedule."""

    about: str
    architecture: str
    config: Mapping[str, Any]
    task: Literal["image", "clm"]
    data: Literal["digits", "python-docs"]
    schedule: Schedule


VOCABULARY, LENGTH = 1024, 128
_VIT = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 10,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

TRAINING: Mapping[str, TrainingRecipe] = MappingProxyType(
    {
        "vit-digits": TrainingRecipe(
            "a small ViT that reads handwritten digits",
            "ViTForImageClassification",
            _VIT,
            "image",
            "digits",
            Schedule(steps=600, batch=64, rate=2e-3, warmup=50, decay=1.0),
        ),
        "gpt2-docs": TrainingRecipe(
            "a small GPT-2 that writes Python documentation",
            "GPT2LMHeadModel",
            _GPT2,
            "clm",
            "python-docs",
            Schedule(steps=600, batch=8, rate=3e-3, warmup=50, decay=0.1),
        ),
        "llama-docs": TrainingRecipe(
            "a small Llama (rotary positions, two heads to a key) that writes Python documentation",
            "LlamaForCausalLM",
            _LLAMA,
            "clm",
            "python-docs",
            Schedule(steps=600, batch=8, rate=3e-3, warmup=50, decay=0.1),
        ),
    }
)


DEMO: Mapping[str, TrainingRecipe] = MappingProxyType({name: TRAINING[name] for name in ("vit-digits", "gpt2-docs")})
"""What the demonstration trains."""


def training_recipe(name: str) -> TrainingRecipe:
    """One of `TRAINING`; others are refused with the list."""
    if name not in TRAINING:
        raise MismatchError(f"no training recipe called '{name}': there are {', '.join(TRAINING)}")
    return TRAINING[name]
