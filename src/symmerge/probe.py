"""Inputs made without data: language models write their own text, and a merge is scored on it against its parents.

This is what "data-free" may still use: the two models themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from symmerge.model import Model
from symmerge.verify import full_module

ROWS, LENGTH = 64, 256
MOST_TARGETS = 40_000_000  # numbers kept of the parents' predictions: 160 MB


@torch.no_grad()
def own_text(model: Model, module: nn.Module, *, rows: int, length: int, seed: int) -> Int[Tensor, "rows length"]:
    """Text a language model samples from itself; a masked one fills a blank page a few places at a time."""
    length = min(length, model.spec.sizes.get("position", length + 2) - 2)
    device = next(module.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return _fill_in(model, module, rows, length) if model.spec.task == "masked-lm" else _continue(model, module, rows, length)


def _continue(model: Model, module: nn.Module, rows: int, length: int) -> Tensor:
    first = model.config.get("bos_token_id")
    vocabulary = model.spec.sizes["vocabulary"]
    device = next(module.parameters()).device
    tokens = torch.full((rows, 1), first, device=device) if first is not None else torch.randint(0, vocabulary, (rows, 1), device=device)
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
    for step in range(0, length, 4):
        drawn = torch.multinomial(_logits(module, tokens)[0].softmax(-1).flatten(0, 1), 1).view_as(tokens)
        here = places[:, step : step + 4]
        tokens = tokens.scatter(1, here, drawn.gather(1, here))
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


def _logits(module: nn.Module, tokens: Tensor) -> list[Tensor]:
    return [value.float() for key, value in module(input_ids=tokens).items() if "logits" in key and value.ndim == 3]


@dataclass(frozen=True)
class Probe:
    """Text both parents wrote, how often each token occurs in it, and what the parents predict there on average."""

    tokens: Int[Tensor, "rows length"]
    counts: Float[Tensor, " vocabulary"]
    targets: Float[Tensor, "rows length vocabulary"]

    @torch.no_grad()
    def score(self, module: nn.Module) -> float:
        """Cross-entropy of a merge to its parents' mean prediction: lower is better, and no data was used."""
        total = 0.0
        for tokens, target in zip(self.tokens.split(8), self.targets.split(8), strict=True):
            total -= (target * _logits(module, tokens)[0].log_softmax(-1)).sum(-1).sum().item()
        return total / self.tokens.numel()


@torch.no_grad()
def make_probe(models: Sequence[Model], *, rows: int = ROWS, length: int = LENGTH, seed: int = 0, device: str = "cpu") -> Probe | None:
    """A probe for language models; None for others, which cannot write their own inputs."""
    if models[0].spec.task not in ("causal-lm", "masked-lm"):
        return None
    modules = [full_module(model, torch.float32).to(device) for model in models]
    texts = [own_text(model, module, rows=rows // len(models), length=length, seed=seed) for model, module in zip(models, modules, strict=True)]
    tokens = torch.cat(texts)
    vocabulary = models[0].spec.sizes["vocabulary"]
    each = max(1, min(rows, MOST_TARGETS // (tokens.shape[1] * vocabulary)) // len(models))
    scored = torch.cat([text[:each] for text in texts])
    targets = torch.cat([torch.stack([_logits(module, part)[0].softmax(-1) for module in modules]).mean(0) for part in scored.split(8)])
    counts = torch.bincount(tokens.flatten(), minlength=vocabulary).float()
    return Probe(scored, counts, targets)
