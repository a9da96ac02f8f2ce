"""Language models: masked and causal. Text is cut into blocks without special tokens, and what does not fill a block is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.data.self_generated import first_logits, mask_token, sample_text
from symmerge.evaluation.data.text import read_text
from symmerge.evaluation.tasks.base import IGNORED, Batch, Task, batched
from symmerge.evaluation.tasks.preprocessing import (
    check_tokens,
    choose_samples,
    max_length,
    tokenizer_of,
)
from symmerge.evaluation.tasks.readouts import TokenReadout
from symmerge.models.model import Model
from symmerge.verification.modules import full_module

MASKING, MASK_SEED = 0.15, 7  # the same masks for every model, method and point
MASKED_BLOCK, CAUSAL_BLOCK = 128, 256
MASKED_SAMPLES, CAUSAL_SAMPLES = 128, 64
ROWS, MAX_LOGITS = 32, 1 << 25  # of a batch; large vocabularies get fewer rows

Tokens = Int[Tensor, "rows length"]


def masked(
    models: Sequence[Model],
    data: str,
    *,
    samples: int | None,
    max_samples: int | None,
    seed: int,
    device: str = "cpu",
) -> Task:
    """Fill in 15% of the tokens, hidden by the mask token: the same ones for every model that is asked."""
    model = models[0]
    length = min(MASKED_BLOCK, max_length(model))
    if data == "self":
        hidden, labels = _own_blanks(
            models, samples or max_samples or MASKED_SAMPLES, length, seed, device
        )
    else:
        tokenizer = tokenizer_of(model)
        tokens, _ = _blocks(
            model, tokenizer, data, length, samples, max_samples or MASKED_SAMPLES, seed
        )
        blank = (
            torch.rand(tokens.shape, generator=torch.Generator().manual_seed(MASK_SEED)) < MASKING
        )
        if not blank.any():
            raise DataError(
                f"{data}: none of {tokens.numel()} tokens was hidden by chance: give more samples"
            )
        labels = torch.where(blank, tokens, IGNORED)
        hidden = torch.where(blank, _mask_of(model, tokenizer), tokens)
    return _task(
        "mlm",
        data,
        seed,
        TokenReadout(causal=False),
        model,
        hidden,
        labels,
        {"block": hidden.shape[1], "masking": MASKING},
    )


def causal(
    models: Sequence[Model],
    data: str,
    *,
    samples: int | None,
    max_samples: int | None,
    seed: int,
    device: str = "cpu",
) -> Task:
    """Predict every next token."""
    model = models[0]
    length = min(CAUSAL_BLOCK, max_length(model))
    if data == "self":
        tokens, characters = (
            _own(models, samples or max_samples or CAUSAL_SAMPLES, length, seed, device),
            None,
        )
    else:
        tokens, characters = _blocks(
            model, tokenizer_of(model), data, length, samples, max_samples or CAUSAL_SAMPLES, seed
        )
    return _task(
        "clm",
        data,
        seed,
        TokenReadout(True, characters),
        model,
        tokens,
        tokens,
        {"block": tokens.shape[1]},
    )


def _blocks(
    model: Model,
    tokenizer: Any,
    data: str,
    length: int,
    samples: int | None,
    default: int,
    seed: int,
) -> tuple[Tokens, float | None]:
    """Random blocks of a text, and how many characters a token after a block's first one stands for, if the tokenizer can tell."""
    found = tokenizer(
        read_text(data),
        add_special_tokens=False,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,
    )
    tokens = np.asarray(found["input_ids"], dtype=np.int64)
    check_tokens(model, int(tokens.max(initial=0)))
    whole = len(tokens) // length
    picked = choose_samples(
        whole, samples, default, seed, what=f"{data}, {len(tokens)} tokens in blocks of {length}"
    )
    characters = None
    if tokenizer.is_fast:
        ends = np.asarray(found["offset_mapping"])[: whole * length, 1].reshape(whole, length)[
            picked
        ]
        characters = float((ends[:, -1] - ends[:, 0]).sum() / (len(picked) * (length - 1)))
    return torch.from_numpy(tokens[: whole * length].reshape(whole, length)[picked]), characters


def _mask_of(model: Model, tokenizer: Any) -> int:
    if tokenizer.mask_token_id is None:
        raise MismatchError(
            f"the tokenizer of {model.where} has no mask token: set mask_token in its tokenizer_config.json"
        )
    return int(tokenizer.mask_token_id)


def _own(models: Sequence[Model], rows: int, length: int, seed: int, device: str) -> Tokens:
    """Text the models write, in equal parts."""
    shares = [len(part) for part in np.array_split(range(rows), len(models))]
    modules = (full_module(model, torch.float32).to(device) for model in models)
    texts = [
        sample_text(model, module, rows=n, length=length, seed=seed)
        for model, module, n in zip(models, modules, shares, strict=True)
        if n
    ]
    return torch.cat(texts).cpu()


@torch.no_grad()
def _own_blanks(
    models: Sequence[Model], rows: int, length: int, seed: int, device: str
) -> tuple[Tokens, Tokens]:
    """Text the models write with blanks in it, and what its writer would put there."""
    hidden, labels = [], []
    for model, part in zip(models, np.array_split(range(rows), len(models)), strict=True):
        if not len(part):
            continue
        module, mask = full_module(model, torch.float32).to(device), mask_token(model)
        generator = torch.Generator().manual_seed(seed)
        for tokens in sample_text(model, module, rows=len(part), length=length, seed=seed).split(
            rows_per_batch(model, length)
        ):
            logits = first_logits(module(input_ids=tokens))
            blank, answers = tokens == mask, torch.full_like(tokens, IGNORED)
            answers[blank] = (
                torch.multinomial(logits[blank].softmax(-1).cpu(), 1, generator=generator)
                .squeeze(1)
                .to(device)
            )
            hidden.append(tokens.cpu())
            labels.append(answers.cpu())
    return torch.cat(hidden), torch.cat(labels)


def rows_per_batch(model: Model, length: int) -> int:
    """As many as keep the logits of a batch in bounds."""
    return max(1, min(ROWS, MAX_LOGITS // (length * model.spec.sizes["vocabulary"])))


def _task(
    name: str,
    data: str,
    seed: int,
    readout: TokenReadout,
    model: Model,
    tokens: Tokens,
    labels: Tokens,
    settings: dict[str, Any],
) -> Task:
    samples = list(zip(tokens, labels, strict=True))
    batches = batched(
        samples,
        rows_per_batch(model, tokens.shape[1]),
        key=lambda sample: (sample[0].tolist(), sample[1].tolist()),
        collate=_collate,
    )
    return Task(name, data, len(samples), seed, readout, batches, settings)


def _collate(samples: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    tokens, labels = zip(*samples, strict=True)
    return {"input_ids": torch.stack(tokens), "labels": torch.stack(labels)}
