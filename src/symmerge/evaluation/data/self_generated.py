"""Self-generated text: language models sample their own inputs, so no data is needed."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from symmerge.models.model import Model

FILLING_PASSES = 32  # in which a masked model fills a blank page
MAX_ROWS = 128  # rows that are written at once: what is kept of them is gigabytes for a model of GPT-2's size
MAX_LOGITS = 1 << 28  # numbers a masked model answers at once: 1 GB


@torch.no_grad()
def sample_text(
    model: Model, module: nn.Module, *, rows: int, length: int, seed: int
) -> Int[Tensor, "rows length"]:
    """Text a language model samples from itself; a masked one fills a blank page a few places at a time."""
    length = min(length, model.spec.sizes.get("position", length + 2) - 2)
    device = next(module.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        masked = model.spec.task == "masked-lm"
        most = (
            max(1, MAX_LOGITS // (length * model.spec.sizes["vocabulary"])) if masked else MAX_ROWS
        )
        write = _fill_in if masked else _continue
        return torch.cat(
            [
                write(model, module, min(most, rows - start), length)
                for start in range(0, rows, most)
            ]
        )


def _continue(model: Model, module: nn.Module, rows: int, length: int) -> Tensor:
    first = model.config.get("bos_token_id")
    vocabulary = model.spec.sizes["vocabulary"]
    device = next(module.parameters()).device
    if (
        first is not None and first >= vocabulary
    ):  # GPT-2's own id stays in the config of one with fewer tokens
        first = None
    tokens = (
        torch.full((rows, 1), first, device=device)
        if first is not None
        else torch.randint(0, vocabulary, (rows, 1), device=device)
    )
    cache, last = None, tokens
    for _ in range(length - 1):
        output = module(input_ids=last, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        last = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1)
        tokens = torch.cat([tokens, last], 1)
    return tokens


def _fill_in(model: Model, module: nn.Module, rows: int, length: int) -> Tensor:
    mask = mask_token(model)
    device = next(module.parameters()).device
    tokens = torch.full((rows, length), mask, device=device)
    places = torch.rand(rows, length, device=device).argsort(1)
    at_once = max(1, length // FILLING_PASSES)
    for step in range(0, length, at_once):
        here = places[:, step : step + at_once]
        logits = first_logits(module(input_ids=tokens)).gather(
            1, here[..., None].expand(-1, -1, model.spec.sizes["vocabulary"])
        )
        tokens = tokens.scatter(
            1, here, torch.multinomial(logits.float().softmax(-1).flatten(0, 1), 1).view_as(here)
        )
    blank = torch.rand(rows, length, device=device) < 0.15
    return torch.where(blank, mask, tokens)


def mask_token(model: Model) -> int:
    """The id a masked language model fills in; by BERT's habit 103 where no tokenizer says otherwise."""
    from transformers import AutoTokenizer

    if model.path is not None and any(file.name.startswith("tokenizer") for file in model.files):
        found = AutoTokenizer.from_pretrained(model.path, local_files_only=True).mask_token_id
        if found is not None:
            return int(found)
    return min(103, model.spec.sizes["vocabulary"] - 1)


def first_logits(output: Any) -> Tensor:
    """Of what a stock model answers; some have several heads, the first is the one that counts."""
    return next(value for key, value in output.items() if "logits" in key)
