"""What a pair makes of real data: statistics of what flows through both models, and a part held out to score merges on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symmerge.evaluation.tasks.base import IGNORED, Batch, Task, split
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.models.model import Model, Progress
from symmerge.observation.activations import Activations, RecordedPair
from symmerge.observation.probe import MAX_TARGETS, Inputs, Observation, Probe, mean_prediction
from symmerge.observation.statistics import Statistics, gather
from symmerge.symmetry.notation import Product
from symmerge.verification.modules import full_module


def form(a: Model, b: Model) -> dict[str, Any]:
    """Which pair, in which form: statistics of one are no use for another."""
    return {
        "a": a.digest(),
        "b": b.digest(),
        "spec": a.spec.fingerprint,
        "steps": [step["step"] for step in a.history],
    }


def observe(
    models: tuple[Model, Model],
    task: Task,
    *,
    modules: tuple[nn.Module, nn.Module] | None = None,
    partial: Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Statistics:
    """Statistics of a pair on all inputs of a task. Models of text must have one tokenizer, or they would not see the same."""
    check_same_tokenizers(models)
    header = {**form(*models), "inputs": [task.record()]}
    found = modules or load_modules(models, device)
    return gather(
        models[0].spec, found, task.batches, header=header, partial=partial, progress=progress
    )


def load_modules(models: tuple[Model, Model], device: str) -> tuple[nn.Module, nn.Module]:
    """In the precision that activations are seen in."""
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
    """A probe from data. A share of the samples is held out to score on; the statistics are gathered on the rest, unless they are given."""
    spec = models[0].spec
    check_same_tokenizers(models)
    modules = load_modules(models, device)
    kept, scored = split(task, held_out) if held_out else (task, None)
    if statistics is None:
        statistics = observe(models, kept, modules=modules, partial=partial, progress=progress)
    inputs, asked, targets = (
        _targets(modules, scored, device) if scored else ([], [], torch.zeros(0, 0))
    )
    counts = _counts(task, spec.sizes["vocabulary"]) if "vocabulary" in spec.sizes else None
    if counts is not None and spec.task in ("causal-lm", "masked-lm") and len(targets):
        counts = (
            counts + targets.sum(0).cpu()
        )  # the parents' predictions say more about rare tokens than the few that occurred
    return Probe("held-out data", inputs, asked, targets, counts, statistics)


@torch.no_grad()
def _targets(
    modules: tuple[nn.Module, ...], task: Task, device: str
) -> tuple[list[Mapping[str, Tensor]], list[Tensor | None], Tensor]:
    """The inputs to score on, the places that count, and the parents' mean predictions there."""
    inputs, asked, targets, total = [], [], [], 0
    for batch in task.batches:
        here, where = inputs_and_mask(batch, device)
        mean = mean_prediction(modules, here, where)
        inputs.append(here)
        asked.append(where)
        targets.append(mean)
        total += mean.numel()
        if total > MAX_TARGETS:
            break
    return inputs, asked, torch.cat(targets)


def inputs_and_mask(batch: Batch, device: str) -> tuple[Inputs, Tensor | None]:
    """A batch's inputs, and the places whose predictions count: those with a label, or the one answer there is."""
    labels = batch["labels"]
    inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
    return inputs, (labels != IGNORED).to(device) if labels.ndim == 2 else None


def _counts(task: Task, size: int) -> Tensor | None:
    counts = torch.zeros(size)
    for batch in task.batches:
        if "input_ids" not in batch:
            return None
        tokens = batch["input_ids"]
        mask = batch.get("attention_mask")
        counts += torch.bincount(
            (tokens if mask is None else tokens[mask.bool()]).flatten(), minlength=size
        )
    return counts


def restrict_stream(seen: Observation, stream: str, which: str) -> Observation:
    """What was seen with the stream at its first or last place alone, or (all) everywhere."""
    if isinstance(seen, Statistics):
        return replace(
            seen,
            moments=_placed(
                seen.moments,
                {name: found.axis for name, found in seen.moments.items()},
                stream,
                which,
            ),
        )
    assert isinstance(seen, RecordedPair)
    return RecordedPair(
        *(
            Activations(
                *(
                    _placed(part, side.axes, stream, which)
                    for part in (side.axes, side.values, side.counts)
                )
            )
            for side in (seen.a, seen.b)
        )
    )


def _placed(
    found: Mapping[str, Any], axes: Mapping[str, Product], stream: str, which: str
) -> dict[str, Any]:
    """In the order of the forward pass, which is that of the names."""
    places = [
        name
        for name in found
        if [getattr(factor, "space", None) for factor in axes[name].factors] == [stream]
    ]
    dropped = {"all": [], "first": places[1:], "last": places[:-1]}[which]
    return {name: value for name, value in found.items() if name not in dropped}
