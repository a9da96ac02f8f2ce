"""Masked and causal language modelling on blocks of text without special tokens.

Tokens that do not fill a block are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.data.self_generated import first_logits, mask_token, sample_text
from symmerge.evaluation.data.text import read_text
from symmerge.evaluation.tasks.base import IGNORED, Batch, LazyBatches, Task, batched
from symmerge.evaluation.tasks.preprocessing import (
    check_tokens,
    encode_long,
    max_length,
    tokenizer_of,
)
from symmerge.evaluation.tasks.readouts import TokenReadout
from symmerge.evaluation.tasks.sampling import Sampling
from symmerge.models.model import Model
from symmerge.verification.modules import full_module

MASKING, MASK_SEED = 0.15, 7  # the same masks for every model, method and point
MASKED_BLOCK, CAUSAL_BLOCK = 128, 256
MASKED_SAMPLES, CAUSAL_SAMPLES = 128, 64
BATCH_ROWS, MAX_LOGITS = 32, 1 << 25  # of a batch; large vocabularies get fewer rows
EXCERPTS, EXCERPT = 8, 1_000_000  # of a long text: two million tokens

Tokens = Int[Tensor, "rows length"]


def masked_task(models: Sequence[Model], data: str, sampling: Sampling) -> Task:
    """Masked language modelling: 15% of the tokens are masked, the same for every model."""
    length = min(sampling.length or MASKED_BLOCK, max_length(models[0]))
    if data == "self":
        inputs, labels = _self_generated_masked(models, length, sampling)
    else:
        inputs, labels = _masked_blocks(models[0], data, length, sampling)
    settings = {"block": inputs.shape[1], "masking": MASKING}
    batches = _batches(models[0], inputs, labels)
    readout = TokenReadout(causal=False)
    return Task("mlm", data, len(inputs), sampling.seed, readout, batches, settings)


def causal_task(models: Sequence[Model], data: str, sampling: Sampling) -> Task:
    """Causal language modelling: predict every next token."""
    length = min(sampling.length or CAUSAL_BLOCK, max_length(models[0]))
    if data == "self":
        tokens, readout = self_generated(models, length, sampling), TokenReadout(causal=True)
    else:
        tokenizer = tokenizer_of(models[0])
        blocks = read_blocks(models[0], tokenizer, data, length, sampling, CAUSAL_SAMPLES)
        tokens, readout = blocks.tokens, TokenReadout(True, blocks.characters_per_token)
    batches, settings = _batches(models[0], tokens, tokens), {"block": tokens.shape[1]}
    return Task("clm", data, len(tokens), sampling.seed, readout, batches, settings)


@dataclass(frozen=True)
class TextBlocks:
    """Random blocks of a text, and characters per token (first tokens excluded), if known."""

    tokens: Tokens
    characters_per_token: float | None


def read_blocks(
    model: Model, tokenizer: Any, data: str, length: int, sampling: Sampling, default: int
) -> TextBlocks:
    tokens, ends = _tokenize(model, tokenizer, excerpts(read_text(data)))
    count = len(tokens) // length
    what = f"{data}, {len(tokens)} tokens in blocks of {length}"
    indices = sampling.choose(count, default, what=what)
    blocks = torch.from_numpy(tokens[: count * length].reshape(count, length)[indices])
    if ends is None:
        return TextBlocks(blocks, None)
    ends = ends[: count * length].reshape(count, length)[indices]
    characters = (ends[:, -1] - ends[:, 0]).sum() / (len(indices) * (length - 1))
    return TextBlocks(blocks, float(characters))


def excerpts(text: str) -> tuple[str, ...]:
    """The text, or pieces from all over a long one: a token takes 250 bytes while it is made."""
    if len(text) <= EXCERPTS * EXCERPT:
        return (text,)
    return tuple(text[at * len(text) // EXCERPTS :][:EXCERPT] for at in range(EXCERPTS))


def _tokenize(
    model: Model, tokenizer: Any, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens of all texts, and where each ends, in characters, if the tokenizer knows."""
    encoded = [encode_long(model, tokenizer, text) for text in texts]
    starts = np.cumsum([0, *map(len, texts[:-1])])
    ends = [
        start + one.ends for start, one in zip(starts, encoded, strict=True) if one.ends is not None
    ]
    return np.concatenate([one.tokens for one in encoded]), np.concatenate(ends) if ends else None


def _masked_blocks(
    model: Model, data: str, length: int, sampling: Sampling
) -> tuple[Tokens, Tokens]:
    """Blocks with masked tokens, and their labels."""
    tokenizer = tokenizer_of(model)
    tokens = read_blocks(model, tokenizer, data, length, sampling, MASKED_SAMPLES).tokens
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(MASK_SEED)) < MASKING
    if not masked.any():
        raise DataError(
            f"{data}: none of {tokens.numel()} tokens was masked by chance: give more samples"
        )
    mask = _tokenizer_mask(model, tokenizer)
    return torch.where(masked, mask, tokens), torch.where(masked, tokens, IGNORED)


def _tokenizer_mask(model: Model, tokenizer: Any) -> int:
    if tokenizer.mask_token_id is None:
        raise MismatchError(
            f"the tokenizer of {model.where} has no mask token:"
            " set mask_token in its tokenizer_config.json"
        )
    check_tokens(model, tokenizer.mask_token_id)
    return int(tokenizer.mask_token_id)


def sampled_texts(
    models: Sequence[Model], rows: int, length: int, sampling: Sampling
) -> Iterator[tuple[Model, nn.Module, Tokens]]:
    """Text sampled from each model in equal parts; one model at a time is in memory."""
    for model, share in zip(models, np.array_split(range(rows), len(models)), strict=True):
        if len(share):
            module = full_module(model, torch.float32, sampling.device)
            options = {"length": length, "seed": sampling.seed, "progress": sampling.progress}
            yield model, module, sample_text(model, module, rows=len(share), **options)


def self_generated(models: Sequence[Model], length: int, sampling: Sampling) -> Tokens:
    rows = sampling.limit(CAUSAL_SAMPLES)
    texts = [tokens for _, _, tokens in sampled_texts(models, rows, length, sampling)]
    return torch.cat(texts).cpu()


@torch.no_grad()
def _self_generated_masked(
    models: Sequence[Model], length: int, sampling: Sampling
) -> tuple[Tokens, Tokens]:
    """Masked text sampled from each model; the same model samples the labels."""
    inputs, labels = [], []
    rows = sampling.limit(MASKED_SAMPLES)
    for model, module, text in sampled_texts(models, rows, length, sampling):
        mask, generator = mask_token(model), torch.Generator().manual_seed(sampling.seed)
        for tokens in text.split(rows_per_batch(model, length)):
            masked, answers = tokens == mask, torch.full_like(tokens, IGNORED)
            logits = first_logits(module(input_ids=tokens))[masked]
            sampled = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)
            answers[masked] = sampled.squeeze(1).to(sampling.device)
            inputs.append(tokens.cpu())
            labels.append(answers.cpu())
    return torch.cat(inputs), torch.cat(labels)


def rows_per_batch(model: Model, length: int) -> int:
    """Rows per batch, so that the logits of a batch have at most MAX_LOGITS entries."""
    return max(1, min(BATCH_ROWS, MAX_LOGITS // (length * model.spec.sizes["vocabulary"])))


def _batches(model: Model, tokens: Tokens, labels: Tokens) -> LazyBatches:
    size = rows_per_batch(model, tokens.shape[1])
    return batched(zip(tokens, labels, strict=True), size, key=_content, collate=_collate)


def _content(sample: tuple[Tensor, Tensor]) -> tuple[list[int], list[int]]:
    tokens, labels = sample
    return tokens.tolist(), labels.tolist()


def _collate(samples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    tokens, labels = zip(*samples, strict=True)
    return {"input_ids": torch.stack(tokens), "labels": torch.stack(labels)}
