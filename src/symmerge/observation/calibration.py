"""Calibration on real data: statistics of a pair, and held-out samples to score merges on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from symmerge.evaluation.tasks.base import IGNORED, Batch, Task, split
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.models.model import Model
from symmerge.models.progress import Progress
from symmerge.observation.gathering import gather
from symmerge.observation.probe import MAX_TARGETS, Probe, ProbeBatch, predictions
from symmerge.observation.statistics import Statistics, StatisticsHeader
from symmerge.symmetry.threads import same_bytes
from symmerge.verification.modules import full_module

Modules = tuple[nn.Module, nn.Module]


def pair_header(a: Model, b: Model) -> StatisticsHeader:
    """Identifies the pair and its form: statistics fit no other."""
    steps = tuple(step.step for step in a.history)
    return StatisticsHeader(a.digest(), b.digest(), a.spec.fingerprint, steps)


@same_bytes()
def gather_pair(
    models: tuple[Model, Model],
    task: Task,
    *,
    modules: Modules | None = None,
    partial: Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Statistics:
    """Statistics of a pair on all inputs of a task. Text models need the same tokenizer."""
    check_same_tokenizers(models)
    header = replace(pair_header(*models), inputs=(task.to_record(),))
    modules = modules or _load_modules(models, device)
    return gather(
        models[0].spec, modules, task.batches, header=header, partial=partial, progress=progress
    )


def _load_modules(models: tuple[Model, Model], device: str) -> Modules:
    """Load both models, in the precision that activations are observed in."""
    a, b = (full_module(model, torch.float32).to(device) for model in models)
    return a, b


def calibrate(
    models: tuple[Model, Model],
    task: Task,
    *,
    held_out: float = 0.25,
    statistics: Statistics | None = None,
    partial: Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Probe:
    """A probe from data: a share is held out for scoring, the rest gives statistics if needed."""
    check_same_tokenizers(models)
    modules = _load_modules(models, device)
    rest, scored = split(task, held_out) if held_out else (task, None)
    if statistics is None:
        statistics = gather_pair(models, rest, modules=modules, partial=partial, progress=progress)
    spec = models[0].spec
    frequencies = _count_tokens(task, spec.sizes.get("vocabulary", 0))
    if scored is None:
        return Probe("held-out data", statistics, frequencies=frequencies)
    if task.readout.training_loss:  # a user's own: only it knows what an answer is worth
        return Probe("held-out data", statistics, task=_placed(scored, device))
    batches, targets = _targets(modules, scored, device)
    if frequencies is not None and spec.task in ("causal-lm", "masked-lm", "seq2seq-lm"):
        # The parents' predictions estimate rare tokens better than the few that occurred.
        frequencies = frequencies + targets.sum(0).cpu()
    return Probe("held-out data", statistics, batches, targets, frequencies)


def _placed(task: Task, device: str) -> Task:
    """The task with its batches on a device."""
    batches = [{name: one.to(device) for name, one in batch.items()} for batch in task.batches]
    return replace(task, batches=batches)


@torch.no_grad()
def _targets(modules: Modules, task: Task, device: str) -> tuple[list[ProbeBatch], Tensor]:
    """Batches to score on, and the parents' mean predictions for them."""
    batches, targets, total = [], [], 0
    for batch in task.batches:
        batches.append(_probe_batch(batch, device))
        targets.append(_mean_prediction(modules, batches[-1]))
        total += targets[-1].numel()
        if total > MAX_TARGETS:
            break
    return batches, torch.cat(targets)


def _mean_prediction(modules: Sequence[nn.Module], batch: ProbeBatch) -> Tensor:
    return torch.stack([predictions(module, batch).softmax(-1) for module in modules]).mean(0)


def _probe_batch(batch: Batch, device: str) -> ProbeBatch:
    """A batch whose labelled positions are scored."""
    labels = batch["labels"]
    inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
    return ProbeBatch(inputs, (labels != IGNORED).to(device) if labels.ndim == 2 else None)


def _count_tokens(task: Task, vocabulary: int) -> Tensor | None:
    """How often each token occurs; None for inputs that are not text."""
    if not vocabulary:
        return None
    counts = torch.zeros(vocabulary)
    for batch in task.batches:
        if "input_ids" not in batch:
            return None
        tokens, mask = batch["input_ids"], batch.get("attention_mask")
        tokens = tokens.flatten() if mask is None else tokens[mask.bool()]
        counts += torch.bincount(tokens, minlength=vocabulary)
    return counts
