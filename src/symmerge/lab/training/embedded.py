"""Small recipes on data that comes with the installation: seconds on one core, as data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from symmerge.evaluation.data.embedded import TOPICS
from symmerge.lab.training.recipe import Schedule, TrainingRecipe

VOCABULARY, LENGTH = 1024, 128
_BODY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENDS = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **_BODY}
_VIT = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 10,
    **_BODY,
    "intermediate_size": 256,
}
# A norm's shift goes into the biases that follow it, so keys have one; positions are not shaken while it learns.
_ROTARY_VIT = {**_VIT, "key_bias": True, "pos_embed_rescale": None}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 256,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "intermediate_size": 192, **_ENDS}
# All of a head turns with its position, as in the paper; Pythia turns a quarter.
ROTARY = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_type": "default"}
_NEOX = {**_TEXT, "intermediate_size": 256, "rope_parameters": ROTARY, **_ENDS}
# Short blocks, few words and large batches: else learned positions tell a model this small nothing for thousands of steps, and it learns word counts alone.
_MASKED = {
    **_TEXT,
    "vocab_size": 512,
    "max_position_embeddings": 16,
    "intermediate_size": 256,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

# Room for a piece of python-topics between its two special tokens.
_ROOMY = {**_MASKED, "max_position_embeddings": 48}
_WRITES = Schedule(steps=600, batch_size=8, lr=3e-3, warmup=50, decay=0.1)
_FILLS = Schedule(steps=1200, batch_size=128, lr=3e-3, warmup=100, decay=0.01)
_SORTS_FIRST = Schedule(steps=600, batch_size=32, lr=3e-3, warmup=60, decay=0.01)


def _docs(
    about: str,
    architecture: str,
    config: Mapping[str, Any],
    task: Any,
    schedule: Schedule,
    **others: Any,
) -> TrainingRecipe:
    return TrainingRecipe(about, architecture, config, task, "python-docs", schedule, **others)


EMBEDDED: Mapping[str, TrainingRecipe] = MappingProxyType(
    {
        "vit-digits": TrainingRecipe(
            "a small ViT that reads handwritten digits",
            "ViTForImageClassification",
            _VIT,
            "image",
            "digits",
            Schedule(steps=600, batch_size=64, lr=2e-3, warmup=50, decay=1.0),
        ),
        "gpt2-docs": _docs(
            "a small GPT-2 that writes Python documentation",
            "GPT2LMHeadModel",
            {**_GPT2, **_ENDS, **_NO_DROPOUT},
            "clm",
            _WRITES,
        ),
        "llama-docs": _docs(
            "a small Llama (rotary positions, two heads to a key) that writes Python documentation",
            "LlamaForCausalLM",
            _LLAMA,
            "clm",
            _WRITES,
        ),
        "neox-docs": _docs(
            "a small GPT-NeoX (rotary positions), of gpt2-docs' size: absolute against rotary",
            "GPTNeoXForCausalLM",
            _NEOX,
            "clm",
            _WRITES,
        ),
        "bert-docs": _docs(
            "a small BERT that fills gaps in Python documentation",
            "BertForMaskedLM",
            _MASKED,
            "mlm",
            _FILLS,
            duration="40 s on one core",
        ),
        "roformer-docs": _docs(
            "a small RoFormer (rotary positions), of bert-docs' size: absolute against rotary",
            "RoFormerForMaskedLM",
            _MASKED,
            "mlm",
            _FILLS,
            duration="40 s on one core",
        ),
        "bert-docs-long": _docs(
            "the same with longer blocks: for topics-bert to begin from",
            "BertForMaskedLM",
            _ROOMY,
            "mlm",
            _SORTS_FIRST,
            duration="30 s on one core",
        ),
        "topics-bert": TrainingRecipe(
            "a BERT (--begin) that says which topic of Python's documentation a line is from",
            "BertForSequenceClassification",
            {"num_labels": TOPICS},
            "text",
            "python-topics",
            Schedule(steps=400, batch_size=32, lr=1e-3, warmup=40, decay=0.01, curve="linear"),
            duration="10 s on one core",
        ),
        "dinov3-digits": TrainingRecipe(
            "a small DINOv3 ViT (rotary positions), of vit-digits' size: absolute against rotary",
            "DINOv3ViTModel",
            _ROTARY_VIT,
            "image",
            "digits",
            Schedule(steps=600, batch_size=64, lr=2e-3, warmup=50, decay=1.0),
        ),
    }
)
