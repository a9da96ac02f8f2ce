"""Inputs without data for a classifier of texts: its base, a language model, writes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from symmerge.evaluation.data.self_generated import (
    first_logits,
    longest_text,
    mask_token,
    sample_text,
)
from symmerge.evaluation.tasks.base import IGNORED, Batch, Task, batched
from symmerge.evaluation.tasks.preprocessing import tokenizer_of
from symmerge.evaluation.tasks.readouts import UnlabelledReadout
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.verification.modules import full_module

LENGTH, SHORTEST, BATCH_ROWS = 64, 8, 32
WRITERS = ("masked-lm", "causal-lm")


@torch.no_grad()
def written_texts(
    tuned: Model,
    writer: Model,
    *,
    samples: int,
    length: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Task:
    """Texts of many lengths that `writer` samples, as TUNED reads them; without labels."""
    module = full_module(writer, torch.float32, torch.device(device))
    how = {"rows": samples, "length": longest_text(tuned, length or LENGTH), "seed": seed}
    tokens = sample_text(writer, module, **how, progress=progress)
    if writer.spec.task == "masked-lm":  # a share of them is masked again at the end
        for rows in tokens.split(BATCH_ROWS):
            logits = first_logits(module(input_ids=rows))
            rows.copy_(torch.where(rows == mask_token(writer), logits.argmax(-1), rows))
    tokens, generator = tokens.cpu(), torch.Generator().manual_seed(seed)
    most = tokens.shape[1]
    lengths = torch.randint(min(SHORTEST, most), most + 1, (samples,), generator=generator)
    first, last, padding = _marks(tuned)
    texts: list[tuple[Tensor, int]] = []
    for row, count in zip(tokens, lengths.tolist(), strict=True):
        text = row[:count].clone()
        text[0] = text[0] if first is None else first
        text[-1] = text[-1] if last is None else last
        texts.append((text, padding))
    batches = batched(texts, BATCH_ROWS, key=_length_first, collate=partial(_pad, most))
    settings = {"texts": f"written by {writer.where}"}
    return Task("text", "self", samples, seed, UnlabelledReadout(), batches, settings)


def _marks(tuned: Model) -> tuple[int | None, int | None, int]:
    """What a text begins and ends with, and what fills it up."""
    padding = tuned.config.get("pad_token_id") or 0
    if not any(file.name.startswith("tokenizer") for file in tuned.files):
        return None, None, padding
    tokenizer = tokenizer_of(tuned)
    ids = tokenizer("a")["input_ids"]
    special = set(tokenizer.all_special_ids)
    first = ids[0] if ids and ids[0] in special else None
    last = ids[-1] if len(ids) > 1 and ids[-1] in special else None
    return first, last, padding


def _length_first(sample: tuple[Tensor, int]) -> tuple[int, list[int]]:
    return len(sample[0]), sample[0].tolist()


def _pad(most: int, samples: Sequence[tuple[Tensor, int]]) -> Batch:
    """All to one length: each shape would need a CUDA graph of its own."""
    texts = [text for text, _ in samples]
    tokens = torch.full((len(texts), most), samples[0][1])
    mask = torch.zeros(len(texts), most, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        mask[row, : len(text)] = 1
    labels = torch.full((len(texts),), IGNORED)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
