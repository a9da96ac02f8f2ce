"""Continuing a text: an encoder reads the first half of a block, its decoder writes the second."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from symmerge.evaluation.data.self_generated import halves, text_inputs
from symmerge.evaluation.tasks.base import Batch, Task, batched
from symmerge.evaluation.tasks.language import (
    CAUSAL_BLOCK,
    CAUSAL_SAMPLES,
    read_blocks,
    rows_per_batch,
    self_generated,
)
from symmerge.evaluation.tasks.preprocessing import max_length, tokenizer_of
from symmerge.evaluation.tasks.readouts import TokenReadout
from symmerge.evaluation.tasks.sampling import Sampling
from symmerge.models.model import Model


def seq2seq_task(models: Sequence[Model], data: str, sampling: Sampling) -> Task:
    """Continue blocks of a text. Data `self`: each model answers what it wrote itself."""
    first = models[0]
    length = min(sampling.length or CAUSAL_BLOCK, max_length(first))
    if data == "self":
        tokens = self_generated(models, length, sampling)
    else:
        tokenizer = tokenizer_of(first)
        tokens = read_blocks(first, tokenizer, data, length, sampling, CAUSAL_SAMPLES).tokens

    def collate(rows: Sequence[Tensor]) -> Batch:
        text = torch.stack(list(rows))
        return {**text_inputs(first, text), "labels": halves(text)[1].contiguous()}

    batches = batched(tokens, rows_per_batch(first, length), key=Tensor.tolist, collate=collate)
    readout = TokenReadout(causal=False, decoder=True)
    return Task("seq2seq", data, len(tokens), sampling.seed, readout, batches, {"block": length})
