"""Tokenizers made from a text, and long texts as tokens, read once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from symmerge.lab.training.cache import cached

END = "<|endoftext|>"
BLANKS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
PIECE = 1_000_000  # characters that are read at a time


def train_tokenizer(text: str, vocabulary: int, *, masked: bool = False) -> Any:
    """Byte-level pairs, the same for the same text: every seed's model speaks the same language. Masked models have blanks and mark where texts end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    named = BLANKS if masked else {"bos_token": END, "eos_token": END}
    special = list(dict.fromkeys(named.values()))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(chunks(text), trainer)
    if masked:
        marks = [(token, special.index(token)) for token in ("[CLS]", "[SEP]")]
        single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=marks
        )  # type: ignore[assignment]
    seen = (
        {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if masked else {}
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named, **seen)


def chunks(text: str) -> Iterator[str]:
    """A text in parts that end with a line: long ones would be held in memory many times over."""
    at = 0
    while at < len(text):
        end = text.find("\n", at + PIECE) + 1 or len(text)
        yield text[at:end]
        at = end


def tokenize(tokenizer: Any, text: str) -> np.ndarray:
    """The text's tokens, without special ones."""
    found = [
        np.asarray(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"], np.int32)
        for piece in chunks(text)
    ]
    return np.concatenate([*found, np.zeros(0, np.int32)])


def cached_tokens(tokenizer: Any, text: str, place: Path, name: str) -> np.ndarray:
    """The same from a file, which is written the first time."""
    digest = hashlib.sha256(
        tokenizer.backend_tokenizer.to_str().encode() + text.encode()
    ).hexdigest()[:12]
    return np.load(
        cached(
            place / f"{name}-{digest}.npy", lambda file: np.save(file, tokenize(tokenizer, text))
        )
    )
