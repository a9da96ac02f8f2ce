"""Train tokenizers on a text; tokenize long texts into cached files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from symmerge.lab.training.cache import cached

END = "<|endoftext|>"
MASKED_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
MASKED_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
CHUNK = 1_000_000  # characters


def train_tokenizer(text: str, vocabulary: int, *, masked: bool = False) -> Any:
    """Train byte-level BPE. It is deterministic, so all seeds share one vocabulary.

    `masked`: with BERT's special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    roles = MASKED_TOKENS if masked else {"bos_token": END, "eos_token": END}
    special = list(dict.fromkeys(roles.values()))
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(chunks(text), trainer)
    if not masked:
        return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    marks = [(token, special.index(token)) for token in ("[CLS]", "[SEP]")]
    single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=marks)
    backend.post_processor = template
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **roles, model_input_names=MASKED_INPUTS
    )


def chunks(text: str) -> Iterator[str]:
    """Split a text into chunks of whole lines: tokenizers need many times a text's memory."""
    at = 0
    while at < len(text):
        end = text.find("\n", at + CHUNK) + 1 or len(text)
        yield text[at:end]
        at = end


def tokenize(tokenizer: Any, text: str) -> np.ndarray:
    """The text's token ids, without special tokens."""
    ids = (
        tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        for chunk in chunks(text)
    )
    return np.concatenate([*(np.asarray(row, np.int32) for row in ids), np.zeros(0, np.int32)])


def cached_tokens(tokenizer: Any, text: str, place: Path, name: str) -> np.ndarray:
    """The text's token ids from a cache file, which is written the first time."""
    content = tokenizer.backend_tokenizer.to_str().encode() + text.encode()
    file = place / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}.npy"
    return np.load(cached(file, lambda target: np.save(target, tokenize(tokenizer, text))))
