"""What a pair makes of real data: statistics of what flows through both models, and a part held out to score merges on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symmerge.model import Model
from symmerge.probe import Probe, predictions
from symmerge.statistics import Statistics, gather
from symmerge.tasks.base import IGNORED, Task, split
from symmerge.verify import full_module

MOST_TARGETS = 50_000_000  # numbers kept of the parents' predictions: 200 MB


def form(a: Model, b: Model) -> dict[str, Any]:
    """Which pair, in which form: statistics of one are no use for another."""
    return {"a": a.digest(), "b": b.digest(), "spec": a.spec.fingerprint, "steps": [step["step"] for step in a.history]}


def calibrate(
    models: tuple[Model, Model],
    task: Task,
    *,
    held_out: float = 0.25,
    statistics: Statistics | None = None,
    partial: Path | None = None,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Probe:
    """A probe from data. A share of the samples is held out to score on; the statistics are gathered on the rest, unless they are given."""
    spec = models[0].spec
    modules = tuple(full_module(model, torch.float32).to(device) for model in models)
    kept, scored = split(task, held_out) if held_out else (task, None)
    if statistics is None:
        header = {**form(*models), "inputs": [kept.record()]}
        statistics = gather(spec, modules, kept.batches, header=header, partial=partial, progress=progress)  # type: ignore[arg-type]
    inputs, asked, targets = _targets(modules, scored, device) if scored else ([], [], torch.zeros(0, 0))
    counts = _counts(task, spec.sizes["vocabulary"]) if "vocabulary" in spec.sizes else None
    if counts is not None and spec.task in ("causal-lm", "masked-lm") and len(targets):
        counts = counts + targets.sum(0).cpu()  # the parents' predictions say more about rare tokens than the few that occurred
    return Probe("held-out data", inputs, asked, targets, counts, statistics)


@torch.no_grad()
def _targets(modules: tuple[nn.Module, ...], task: Task, device: str) -> tuple[list[Mapping[str, Tensor]], list[Tensor | None], Tensor]:
    """The inputs to score on, the places that count, and the parents' mean predictions there."""
    inputs, asked, targets, total = [], [], [], 0
    for batch in task.batches:
        labels = batch["labels"]
        here = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
        where = (labels != IGNORED).to(device) if labels.ndim == 2 else None
        mean = torch.stack([predictions(module, here, where).softmax(-1) for module in modules]).mean(0)
        inputs.append(here)
        asked.append(where)
        targets.append(mean)
        total += mean.numel()
        if total > MOST_TARGETS:
            break
    return inputs, asked, torch.cat(targets)


def _counts(task: Task, size: int) -> Tensor | None:
    counts = torch.zeros(size)
    for batch in task.batches:
        if "input_ids" not in batch:
            return None
        tokens = batch["input_ids"]
        mask = batch.get("attention_mask")
        counts += torch.bincount((tokens if mask is None else tokens[mask.bool()]).flatten(), minlength=size)
    return counts


def only(statistics: Statistics, stream: str, which: str) -> Statistics:
    """The statistics with the stream seen at its first or last place alone, or (all) everywhere."""
    places = [name for name, found in statistics.moments.items() if [getattr(factor, "space", None) for factor in found.axis.factors] == [stream]]
    dropped = {"all": [], "first": places[1:], "last": places[:-1]}[which]
    return replace(statistics, moments={name: found for name, found in statistics.moments.items() if name not in dropped})
