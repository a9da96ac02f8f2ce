"""How often tokens occur by the word of language models themselves: chains of single tokens.

Each model continues one token by one token, which it then sees alone. Endless chains have nearly
the frequencies of text it would write (correlation of logarithms .93 for GPT-2, .89 for Llama).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.evaluation.data.self_generated import first_logits, text_inputs
from symmerge.models.model import Model
from symmerge.models.tables import has_decoder
from symmerge.verification.modules import full_module

CHAINS, STEPS = 256, 8
FORGOTTEN = 2  # steps, until chains have forgotten their random beginnings
MIN_CHAINS = 32
WORK = {"cpu": 200_000_000_000, "cuda": 20_000_000_000_000}  # parameters times tokens
COUNT = 64 * 256  # frequencies are expected counts in so many tokens, as those of a probe


def token_frequencies(
    models: Sequence[Model], *, seed: int = 0, device: str = "cpu"
) -> Float[Tensor, " vocabulary"] | None:
    """Expected counts of all tokens, mean of the models; None: no causal models, or too large."""
    budget = WORK.get(torch.device(device).type, WORK["cpu"])
    chains = min(CHAINS, budget // (models[0].parameters * STEPS * len(models)))
    if models[0].spec.task not in ("causal-lm", "seq2seq-lm") or chains < MIN_CHAINS:
        return None
    predictions = [_mean_prediction(model, chains, seed, device) for model in models]
    return COUNT * torch.stack(predictions).mean(0)


@torch.no_grad()
def _mean_prediction(
    model: Model, chains: int, seed: int, device: str
) -> Float[Tensor, " vocabulary"]:
    # products of bfloat16 are exact enough for frequencies, and end no GPU
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    module = full_module(model, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    size = model.spec.sizes["vocabulary"]
    tokens = torch.randint(0, size, (chains, 1), generator=generator, device=device)
    total = torch.zeros(size, device=device)
    for step in range(STEPS):
        predicted = first_logits(module(**_continued(model, tokens)))[:, -1].float().softmax(-1)
        if step >= FORGOTTEN:
            total += predicted.mean(0)
        tokens = predicted.multinomial(1, generator=generator)
    return total.cpu() / (STEPS - FORGOTTEN)


def _continued(model: Model, tokens: Tensor) -> dict[str, Tensor]:
    """Each token alone, to be continued by one; a decoder begins its answer to it."""
    nothing = tokens.new_zeros(tokens.shape)
    return text_inputs(model, torch.cat([tokens, nothing], 1) if has_decoder(model) else tokens)
