"""The papers' models, as data: trained on data sets in a folder, on a GPU.

Where Theus et al. are silent or unclear: their public code for Tiny Shakespeare has blocks of 256 tokens, a rate of 3e-4, an output of its own, a look at the
validation part every 50 steps, five looks of patience, and keeps the best; so do we. The paper calls Trainer's AdamW "Adam", so the ViT has AdamW, too; with
Adam's own L2 penalty most of layers 2 to 5 becomes zero, and accuracy stays at 75%. What does not fill a batch is left out of an epoch, and no gradients are
clipped. For Tiny ImageNet they give layers, heads and widths; patches of 4 x 4 and a padding of 4 they state of the ViT as such, so they are here, too; crops are as
large as the pictures, 64 x 64, and all else is as for CIFAR. BookCorpus is not to be had here: 62 novels stand for it, a hundredth of its size, so there are
more passes and the best is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from symmerge.lab.training.embedded import ROTARY
from symmerge.lab.training.recipe import DEFAULT_BETAS, Schedule, TrainingRecipe

VOCABULARY, LENGTH, MASKED_LENGTH = 4096, 256, 128
_BODY = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
_ENDS = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **_BODY}
_VIT = {
    "image_size": 32,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": 10,
    **_BODY,
    "intermediate_size": 512,
}
_TINY_VIT = {
    **_VIT,
    "image_size": 64,
    "num_labels": 200,
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "intermediate_size": 768,
}
_GPT2 = {
    "n_positions": LENGTH,
    "n_embd": 256,
    "n_layer": 6,
    "n_inner": 1024,
    "tie_word_embeddings": False,
}
_MASKED = {**_TEXT, "max_position_embeddings": MASKED_LENGTH, "intermediate_size": 1024}

_AS_PUBLISHED: dict[str, Any] = {"clip": 0.0, "betas": DEFAULT_BETAS, "all_decay": True}
_PICTURES = Schedule(
    steps=150 * 390, batch_size=128, lr=3e-4, warmup=0, decay=1e-3, curve="epochs", **_AS_PUBLISHED
)
_QUICK_PICTURES = replace(_PICTURES, steps=24 * 390)
_PLAYS = Schedule(
    steps=100 * 36,
    batch_size=32,
    lr=3e-4,
    warmup=180,
    decay=0.01,
    evaluate_every=50,
    patience=5,
    **_AS_PUBLISHED,
)
_BOOKS = Schedule(
    steps=6000,
    batch_size=64,
    lr=2.5e-4,
    warmup=300,
    decay=0.01,
    evaluate_every=250,
    patience=5,
    **_AS_PUBLISHED,
)
_NOVELS = Schedule(steps=3500, batch_size=64, lr=1e-3, warmup=175, decay=0.1)
_GAPS = Schedule(steps=8000, batch_size=128, lr=1e-3, warmup=400, decay=0.1)


def _novels(
    about: str,
    architecture: str,
    config: Mapping[str, Any],
    task: Any,
    schedule: Schedule,
    duration: str,
) -> TrainingRecipe:
    return TrainingRecipe(
        about, architecture, config, task, "books", schedule, duration, blocks="whole"
    )


def _classifier(
    data: str, about: str, steps: int, evaluate_every: int, classes: int = 2
) -> TrainingRecipe:
    """These models overfit small tasks within a few passes: the best is kept."""
    schedule = Schedule(
        steps,
        batch_size=32,
        lr=1e-4,
        warmup=steps // 10,
        decay=0.01,
        betas=DEFAULT_BETAS,
        curve="linear",
        all_decay=True,
        evaluate_every=evaluate_every,
    )
    return TrainingRecipe(
        about,
        "BertForSequenceClassification",
        {"num_labels": classes},
        "text",
        data,
        schedule,
        "a minute on a GPU, from a pretrained BERT",
    )


_CIFAR10 = TrainingRecipe(
    "ViT on CIFAR-10, the last of 150 epochs",
    "ViTForImageClassification",
    _VIT,
    "image",
    "cifar10",
    _PICTURES,
    "3 minutes on an H200",
    augment=True,
)

PUBLISHED: Mapping[str, TrainingRecipe] = MappingProxyType(
    {
        "cifar10-vit": _CIFAR10,
        "cifar10-vit-best": replace(
            _CIFAR10,
            about="the same, the best epoch by 5,000 training images that are held back",
            schedule=replace(_PICTURES, steps=150 * 351, evaluate_every=351),
        ),
        "cifar10-vit-short": replace(
            _CIFAR10,
            about="the same, 24 epochs: before it overfits",
            schedule=_QUICK_PICTURES,
            duration="a minute on an H200",
        ),
        "cifar10-dinov3": replace(
            _CIFAR10,
            about="DINOv3 ViT of the same size, 24 epochs: rotary positions",
            architecture="DINOv3ViTModel",
            config={**_VIT, "key_bias": True, "pos_embed_rescale": None},
            schedule=_QUICK_PICTURES,
            duration="a minute on an H200 (estimated)",
        ),
        "cifar100-vit": replace(
            _CIFAR10,
            about="ViT on CIFAR-100, as on CIFAR-10",
            config={**_VIT, "num_labels": 100},
            data="cifar100",
        ),
        "tiny-imagenet-vit": replace(
            _CIFAR10,
            about="ViT on Tiny ImageNet: 8 layers, 384 wide, the last of 150 epochs",
            config=_TINY_VIT,
            data="tiny-imagenet",
            schedule=replace(_PICTURES, steps=150 * 781),
            duration="about an hour on an H200 (estimated)",
        ),
        "shakespeare-gpt2": TrainingRecipe(
            "GPT-2 on Tiny Shakespeare, the best by its validation part",
            "GPT2LMHeadModel",
            {"vocab_size": 50257, **_GPT2, "n_head": 4},
            "clm",
            "shakespeare",
            _PLAYS,
            "20 s on an H200",
            blocks="whole",
            tokenizer="gpt2_tokenizer",
        ),
        "books-gpt2": _novels(
            "GPT-2, 512 wide, on novels, as on BookCorpus",
            "GPT2LMHeadModel",
            {
                "vocab_size": VOCABULARY,
                "n_positions": 512,
                "n_embd": 512,
                "n_layer": 6,
                "n_head": 8,
                "n_inner": 2048,
                **_ENDS,
            },
            "clm",
            _BOOKS,
            "about 4 minutes on an H200 (estimated)",
        ),
        "books-gpt2-small": _novels(
            "GPT-2, 256 wide, on novels: absolute positions",
            "GPT2LMHeadModel",
            {"vocab_size": VOCABULARY, **_GPT2, "n_head": 8, **_ENDS},
            "clm",
            _NOVELS,
            "a minute on an H200",
        ),
        "books-neox": _novels(
            "GPT-NeoX of the same size: rotary positions",
            "GPTNeoXForCausalLM",
            {**_TEXT, "intermediate_size": 1024, "rope_parameters": ROTARY, **_ENDS},
            "clm",
            _NOVELS,
            "a minute on an H200 (estimated)",
        ),
        "books-llama": _novels(
            "Llama of the same size: rotary positions, two heads to a key",
            "LlamaForCausalLM",
            {**_TEXT, "num_key_value_heads": 4, "intermediate_size": 704, **_ENDS},
            "clm",
            _NOVELS,
            "a minute on an H200",
        ),
        "books-bert": _novels(
            "BERT, 256 wide, on novels",
            "BertForMaskedLM",
            _MASKED,
            "mlm",
            _GAPS,
            "2 minutes on an H200",
        ),
        "books-roformer": _novels(
            "RoFormer of the same size: rotary positions",
            "RoFormerForMaskedLM",
            _MASKED,
            "mlm",
            _GAPS,
            "2 minutes on an H200 (estimated)",
        ),
        "sst2-bert": _classifier(
            "sst2", "a BERT (--begin) that tells good reviews from bad ones", 1125, 225
        ),
        "cola-bert": _classifier(
            "cola", "a BERT (--begin) that tells sentences from what is none", 720, 240
        ),
        "mrpc-bert": _classifier(
            "mrpc", "a BERT (--begin) that sees whether two sentences say the same", 450, 112
        ),
        "rte-bert": _classifier(
            "rte", "a BERT (--begin) that sees whether one text follows from another", 280, 70
        ),
        "agnews-bert": _classifier(
            "agnews", "a BERT (--begin) that sorts news", 1260, 315, classes=4
        ),
    }
)
