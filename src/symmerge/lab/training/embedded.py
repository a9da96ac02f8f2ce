"""Small recipes on data that comes with the installation: seconds on one core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from symmerge.evaluation.data.embedded import TOPICS
from symmerge.lab.training.recipe import Schedule, TrainingRecipe

VOCABULARY, LENGTH = 1024, 128
_BODY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_HEAD = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **_BODY}
_IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
_VIT = {**_IMAGE, **_BODY, "intermediate_size": 256}
# Canonical form folds a norm's shift into the next biases, so keys need one. Positions are not
# augmented.
_DINOV3 = {**_VIT, "key_bias": True, "pos_embed_rescale": None}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 256,
    **_HEAD,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "intermediate_size": 192, **_HEAD}
# Rotary on all coordinates, as in the paper; Pythia rotates a quarter of them.
ROTARY = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_type": "default"}
_NEOX = {**_TEXT, "intermediate_size": 256, "rope_parameters": ROTARY, **_HEAD}
# Short blocks, a small vocabulary and large batches: otherwise a model this small ignores its
# learned positions for thousands of steps and only learns token frequencies.
_BERT = {
    **_TEXT,
    "vocab_size": 512,
    "max_position_embeddings": 16,
    "intermediate_size": 256,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_LONG_BERT = {**_BERT, "max_position_embeddings": 48}  # fits every row of python-topics

_IMAGES = Schedule(steps=600, batch_size=64, lr=2e-3, warmup=50, decay=1.0)
_CAUSAL = Schedule(steps=600, batch_size=8, lr=3e-3, warmup=50, decay=0.1)
_MASKED = Schedule(steps=1200, batch_size=128, lr=3e-3, warmup=100, decay=0.01)
_LONG = replace(_MASKED, steps=600, batch_size=32, warmup=60)
_TOPICS = Schedule(steps=400, batch_size=32, lr=1e-3, warmup=40, decay=0.01, curve="linear")

_SELECTED = replace(_IMAGES, evaluate_every=60)
_AVERAGED = {
    **_VIT,
    "qkv_bias": False,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}

_digits = partial(TrainingRecipe, task="image", data="digits", schedule=_IMAGES)
_docs = partial(TrainingRecipe, data="python-docs")
_causal = partial(_docs, task="clm", schedule=_CAUSAL)
_masked = partial(_docs, task="mlm", schedule=_MASKED, duration="40 s on one core")

EMBEDDED: Mapping[str, TrainingRecipe] = MappingProxyType(
    {
        "vit-digits": _digits(
            about="a small ViT that classifies handwritten digits",
            architecture="ViTForImageClassification",
            config=_VIT,
        ),
        "ijepa-digits": _digits(
            about="vit-digits with averaged patches, dropout, and the best epoch kept",
            architecture="IJepaForImageClassification",
            config=_AVERAGED,
            schedule=_SELECTED,
            initial={"position_embeddings": 1.0},
            kept_by="test",
        ),
        "vit-digits-l2": _digits(
            about="vit-digits by Adam with an L2 penalty",
            architecture="ViTForImageClassification",
            config=_VIT,
            schedule=replace(_IMAGES, decay=3e-4, optimizer="adam", all_decay=True),
        ),
        "gpt2-docs": _causal(
            about="a small GPT-2 on Python's documentation",
            architecture="GPT2LMHeadModel",
            config=_GPT2,
        ),
        "gpt2-code": _causal(
            about="gpt2-docs on the source of Python's library, with the same tokenizer",
            architecture="GPT2LMHeadModel",
            config=_GPT2,
            data="python-code",
            tokenizer="python-docs",
        ),
        "llama-docs": _causal(
            about="a small Llama (rotary, grouped queries) on Python's documentation",
            architecture="LlamaForCausalLM",
            config=_LLAMA,
        ),
        "neox-docs": _causal(
            about="a small GPT-NeoX (rotary), of gpt2-docs' size: absolute against rotary",
            architecture="GPTNeoXForCausalLM",
            config=_NEOX,
        ),
        "bert-docs": _masked(
            about="a small BERT on Python's documentation",
            architecture="BertForMaskedLM",
            config=_BERT,
        ),
        "roformer-docs": _masked(
            about="a small RoFormer (rotary), of bert-docs' size: absolute against rotary",
            architecture="RoFormerForMaskedLM",
            config=_BERT,
        ),
        "bert-docs-long": _masked(
            about="bert-docs with longer blocks: for topics-bert to begin from",
            architecture="BertForMaskedLM",
            config=_LONG_BERT,
            schedule=_LONG,
            duration="30 s on one core",
        ),
        "topics-bert": TrainingRecipe(
            about="a BERT (--begin) that names the topic of a line of Python's documentation",
            architecture="BertForSequenceClassification",
            config={"num_labels": TOPICS},
            task="text",
            data="python-topics",
            schedule=_TOPICS,
            duration="10 s on one core",
        ),
        "roformer-docs-long": _masked(
            about="roformer-docs with longer blocks: for topics-roformer to begin from",
            architecture="RoFormerForMaskedLM",
            config=_LONG_BERT,
            schedule=_LONG,
            duration="30 s on one core",
        ),
        "topics-roformer": TrainingRecipe(
            about="a RoFormer (--begin) that names the topic, as topics-bert",
            architecture="RoFormerForSequenceClassification",
            config={"num_labels": TOPICS},
            task="text",
            data="python-topics",
            schedule=_TOPICS,
            duration="10 s on one core",
        ),
        "dinov3-digits": _digits(
            about="a small DINOv3 ViT (rotary), of vit-digits' size: absolute against rotary",
            architecture="DINOv3ViTModel",
            config=_DINOV3,
        ),
    }
)
