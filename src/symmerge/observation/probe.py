"""Inputs made without data: language models write their own text, and a merge is scored on it against its parents.

This is what "data-free" may still use: the two models themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from symmerge.evaluation.data.self_generated import logits_of, mask_token, sample_text
from symmerge.models.model import Model
from symmerge.observation.activations import (
    Activations,
    RecordedPair,
    Score,
    mean_activations,
    record_activations,
)
from symmerge.verification.modules import full_module

ROWS, LENGTH = 64, 256
FEWEST_ROWS, SHORTEST = 8, 32
BATCH = 8
MAX_TARGETS = 50_000_000  # numbers kept of the parents' predictions: 200 MB
WORK = 70_000_000_000  # parameters times tokens that both parents together may write
ACTIVATION_BYTES = 150_000_000  # of one model, kept of what flows through it


Inputs = Mapping[str, Tensor]


@runtime_checkable
class Observation(Protocol):
    """What flowed through two models, as samples or as statistics of more than could be kept."""

    def activations(self, score: Score) -> tuple[Activations, Activations]: ...


@dataclass(frozen=True)
class Probe:
    """Inputs that both parents saw, what flowed through them, and what they make of it.

    `asked` marks the places whose predictions count (blanks of a masked model, else all), `targets` are the parents' mean predictions there
    (none where nothing is to be scored), `frequencies` how often each token is to be expected.
    """

    about: str
    inputs: Sequence[Inputs]
    asked: Sequence[Bool[Tensor, ...] | None]
    targets: Float[Tensor, "places classes"]
    frequencies: Float[Tensor, " vocabulary"] | None
    observation: Observation

    @property
    def scored(self) -> bool:
        """Whether merges can be scored on it."""
        return len(self.targets) > 0

    @torch.no_grad()
    def score(self, module: nn.Module) -> float:
        """Cross-entropy of a merge to its parents' mean prediction: lower is better, and no label is needed."""
        total, start = 0.0, 0
        for inputs, asked in zip(self.inputs, self.asked, strict=True):
            predicted = predictions(module, inputs, asked).log_softmax(-1)
            total -= (self.targets[start : start + len(predicted)] * predicted).sum().item()
            start += len(predicted)
        return total / max(1, start)


def predictions(
    module: Callable[..., Any], inputs: Inputs, asked: Tensor | None
) -> Float[Tensor, "places classes"]:
    """A model's logits at the places asked for."""
    found = logits_of(module(**inputs))
    return (found if asked is None else found[asked]).flatten(0, -2).float()


@torch.no_grad()
def mean_prediction(
    modules: Sequence[nn.Module], inputs: Inputs, asked: Tensor | None
) -> Float[Tensor, "places classes"]:
    """What several models predict on average."""
    return torch.stack([predictions(module, inputs, asked).softmax(-1) for module in modules]).mean(
        0
    )


@torch.no_grad()
def make_probe(
    models: Sequence[Model],
    *,
    scored: bool = True,
    text: Tensor | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Probe | None:
    """A probe for language models; None for others, which cannot write their own inputs, and for models too large to write any in reasonable time.

    The last model is B; if there are more than two, the mean of what flows through the others stands for A. `text` is what they wrote before, where
    they did. Without `scored`, the parents' predictions are not kept, and nothing can be scored. One model at a time is in memory.
    """
    spec = models[0].spec
    tokens = _written(models, seed, device) if text is None else text
    if tokens is None:
        return None
    asked = (
        tokens == mask_token(models[0])
        if spec.task == "masked-lm"
        else torch.ones_like(tokens, dtype=torch.bool)
    )
    widths = sum(
        max(shape)
        for shape in spec.shapes.values()
        if len(shape) == 2 and spec.sizes["vocabulary"] not in shape
    )
    share = min(1.0, ACTIVATION_BYTES / (4 * widths * tokens.numel()))
    batches, places = [{"input_ids": part} for part in tokens.split(BATCH)], asked.split(BATCH)
    targets = torch.zeros(
        int(asked.sum()) if scored else 0, spec.sizes["vocabulary"], device=device
    )
    frequencies = torch.zeros(spec.sizes["vocabulary"], device=device)

    def flow(model: Model) -> Activations:
        """What flows through a model; what it predicts is added up."""
        nonlocal frequencies
        module, start = full_module(model, torch.float32).to(device), 0
        with record_activations(spec, module, share=share, seed=seed) as recorder:
            for inputs, where in zip(batches, places, strict=True):
                predicted = predictions(module, inputs, where).softmax(-1) / len(models)
                # The parents' predictions say more about rare tokens than the few that were drawn.
                frequencies += predicted.sum(0)
                if scored:
                    targets[start : start + len(predicted)] += predicted
                    start += len(predicted)
        return recorder.activations()

    observation = RecordedPair(
        mean_activations(flow(model) for model in models[:-1]), flow(models[-1])
    )
    return Probe(
        "own text",
        batches,
        places,
        targets,
        (frequencies * tokens.numel() / asked.sum()).cpu(),
        observation,
    )


def _written(models: Sequence[Model], seed: int, device: str) -> Int[Tensor, "rows length"] | None:
    """What models write together, each as much; None, if they cannot, or not in reasonable time."""
    rows, length = (
        _affordable(models[0]) if models[0].spec.task in ("causal-lm", "masked-lm") else (0, 0)
    )
    if not rows:
        return None
    modules = (full_module(model, torch.float32).to(device) for model in models)
    return torch.cat(
        [
            sample_text(model, module, rows=max(1, rows // len(models)), length=length, seed=seed)
            for model, module in zip(models, modules, strict=True)
        ]
    )


def _affordable(model: Model) -> tuple[int, int]:
    """How much text a model of this size writes in about the time it takes to match it; none if that is not worth reading."""
    work = WORK // 2 if model.spec.task == "masked-lm" else WORK  # filling a page takes many passes
    places = min(
        work // model.parameters, MAX_TARGETS // model.spec.sizes["vocabulary"], ROWS * LENGTH
    )
    length = max(
        SHORTEST, min(LENGTH, places // ROWS)
    )  # many short rows say more than a few long ones, and are written faster
    return (places // length, length) if places >= FEWEST_ROWS * length else (0, 0)
