"""A probe: inputs for both parents, and their predictions on them, to score merges against.

`make_probe` needs no data: language models sample their own text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from symmerge.checkpoints.memory import free_memory, freed_memory_kept
from symmerge.evaluation.data.self_generated import (
    first_logits,
    longest_text,
    mask_token,
    sample_text,
    text_inputs,
)
from symmerge.evaluation.tasks.base import Task
from symmerge.models.model import Model
from symmerge.observation.activations import (
    Activations,
    Observation,
    RecordedPair,
    mean_activations,
    record_activations,
)
from symmerge.symmetry.groups.linalg import total
from symmerge.verification.modules import full_module

ROWS, LENGTH = 64, 256
MIN_ROWS, MIN_LENGTH = 8, 32
BATCH_SIZE = 8
MAX_TARGETS = 50_000_000  # entries of the parents' predictions: 200 MB
# Parameters times tokens: the budget for sampling from both parents. Any model gets a few rows.
WORK = {"cpu": 70_000_000_000, "cuda": 7_000_000_000_000}
ACTIVATION_BYTES = 150_000_000  # of recorded activations, per model

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class ProbeBatch:
    """Inputs, and the positions that are scored; None where there is one prediction."""

    inputs: Inputs
    positions: Bool[Tensor, ...] | None


@dataclass(frozen=True)
class Probe:
    """Inputs, both parents' activations on them, and their predictions.

    `targets` are the parents' mean predictions at the scored positions (none where nothing is
    scored), `frequencies` the expected frequencies of tokens.
    """

    about: str
    observation: Observation
    batches: Sequence[ProbeBatch] = ()
    targets: Float[Tensor, "places classes"] = field(default_factory=lambda: torch.zeros(0, 0))
    frequencies: Float[Tensor, " vocabulary"] | None = None
    task: Task | None = None  # its loss scores merges, instead of the targets

    @property
    def scored(self) -> bool:
        """Whether merges can be scored on it."""
        return len(self.targets) > 0 or self.task is not None

    @torch.no_grad()
    def score(self, module: nn.Module) -> float:
        """Cross-entropy to the parents' mean prediction, or the task's loss: lower is better."""
        if self.task:
            return self.task.evaluate(module)["loss"]
        score, start = 0.0, 0
        for batch in self.batches:
            predicted = predictions(module, batch).log_softmax(-1)
            targets = self.targets[start : start + len(predicted)]
            score -= total(targets * predicted).item()
            start += len(predicted)
        return score / max(1, start)


def predictions(
    module: Callable[..., object], batch: ProbeBatch
) -> Float[Tensor, "places classes"]:
    """A model's logits at the scored positions."""
    logits = first_logits(module(**batch.inputs))
    if batch.positions is not None:
        logits = logits[batch.positions]
    return logits.flatten(0, -2).float()


@freed_memory_kept()
def make_probe(
    models: Sequence[Model],
    *,
    scored: bool = True,
    text: Tensor | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Probe | None:
    """A probe of self-generated text; None where none can be sampled.

    The last model is B. Of more than two, the mean activations of the others stand for A. `text`
    reuses an earlier sample. Without `scored` no targets are kept. Only one model at a time is in
    memory.
    """
    tokens = _sample_together(models, seed, device) if text is None else text
    if tokens is None:
        return None
    targets = _Targets(models, tokens, scored=scored, seed=seed, device=device)
    a = mean_activations(targets.add(model) for model in models[:-1])
    observation = RecordedPair(a, targets.add(models[-1]))
    return Probe(
        "self-generated text",
        observation,
        targets.batches,
        targets.values,
        (targets.frequencies * tokens.numel() / targets.count).cpu(),
    )


class _Targets:
    """Adds up the predictions of models on text, and records their activations."""

    def __init__(
        self, models: Sequence[Model], tokens: Tensor, *, scored: bool, seed: int, device: str
    ) -> None:
        self.spec, self.device, self.scored, self.seed = models[0].spec, device, scored, seed
        self.models = len(models)
        masked = self.spec.task == "masked-lm"
        rows = [text_inputs(models[0], text) for text in tokens.split(BATCH_SIZE)]
        read = [inputs[list(inputs)[-1]] for inputs in rows]  # by what predicts
        mask = mask_token(models[0]) if masked else None
        positions = [text == mask if masked else torch.ones_like(text).bool() for text in read]
        self.batches = [ProbeBatch(*batch) for batch in zip(rows, positions, strict=True)]
        self.count = torch.stack([places.sum() for places in positions]).sum()
        vocabulary = self.spec.sizes["vocabulary"]
        self.values = torch.zeros(int(self.count) if scored else 0, vocabulary, device=device)
        self.frequencies = torch.zeros(vocabulary, device=device)
        matrices = (shape for shape in self.spec.shapes.values() if len(shape) == 2)
        widths = sum(max(shape) for shape in matrices if vocabulary not in shape)
        self.share = min(1.0, ACTIVATION_BYTES / (4 * widths * tokens.numel()))

    @torch.no_grad()
    def add(self, model: Model) -> Activations:
        """Add a model's predictions; returns its activations."""
        module, start = full_module(model, torch.float32, self.device), 0
        with record_activations(self.spec, module, share=self.share, seed=self.seed) as recorder:
            for batch in self.batches:
                predicted = predictions(module, batch).softmax(-1) / self.models
                # Predictions estimate rare tokens better than the few that were sampled.
                self.frequencies += predicted.sum(0)
                if self.scored:
                    self.values[start : start + len(predicted)] += predicted
                    start += len(predicted)
        return recorder.activations()


def _sample_together(
    models: Sequence[Model], seed: int, device: str
) -> Int[Tensor, "rows length"] | None:
    """The same number of rows from each model; None if they cannot generate, or do not fit."""
    fits = 4 * models[0].parameters < free_memory(torch.device(device))
    if models[0].spec.task not in ("causal-lm", "masked-lm", "seq2seq-lm") or not fits:
        return None
    rows, length = _affordable(models[0], torch.device(device).type)
    rows = max(1, rows // len(models))
    modules = (full_module(model, torch.float32).to(device) for model in models)
    texts = [
        sample_text(model, module, rows=rows, length=length, seed=seed)
        for model, module in zip(models, modules, strict=True)
    ]
    return torch.cat(texts)


def _affordable(model: Model, device: str) -> tuple[int, int]:
    """Rows and length of text to sample in about the time of a match; a few for any model."""
    work = WORK[device]
    if model.spec.task == "masked-lm":
        work //= 3  # filling masks takes many passes
    targets = MAX_TARGETS // model.spec.sizes["vocabulary"]
    tokens = min(work // model.parameters, targets, ROWS * LENGTH)
    # Many short rows tell more than a few long ones, and are sampled faster.
    length = longest_text(model, max(MIN_LENGTH, min(LENGTH, tokens // ROWS)))
    return max(MIN_ROWS, tokens // length), length
