"""Train small stock models: initial weights and the order of the batches follow the seed, and nothing else does."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_

from symmerge.card import versions
from symmerge.checkpoint import new_folder, read_json, write_json, write_weights
from symmerge.groups.linalg import one_thread
from symmerge.model import Progress, load
from symmerge.tasks import Batch
from symmerge.zoo.feed import FEEDS
from symmerge.zoo.recipes import Schedule, TrainingRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCHEMA, METRICS = "symmerge.training/1", "metrics.json"
BETAS = (0.9, 0.98)  # a shorter memory than usual: these runs are short


def train(recipe: TrainingRecipe, seed: int, out: Path, progress: Progress | None = None, *, overwrite: bool = False) -> Path:
    """Train a model and write it as a stock checkpoint: `train(training_recipe("vit-digits"), 0, Path("seed-0"))`.

    `progress` is called after every step. The folder appears whole at the end or not at all; metrics.json in it has the loss of every step.
    """
    with one_thread(), new_folder(out, overwrite=overwrite) as folder:  # before the work: a place that cannot be written is refused now
        began = time.perf_counter()
        feed = FEEDS[recipe.task](recipe)
        model = _fresh(recipe, seed)
        losses = _fit(model, feed.batches(recipe.schedule.batch, torch.Generator().manual_seed(seed)), recipe.schedule, progress)
        _write(model, folder)
        feed.save(folder)
        write_json(folder / METRICS, {**_origin(recipe, seed), "losses": losses, "seconds": time.perf_counter() - began})
    return out


def trained(recipe: TrainingRecipe, seed: int, folder: Path) -> bool:
    """Whether a folder holds what `train` would write there: the same recipe, seed and versions."""
    if not (folder / METRICS).exists():
        return False
    found = read_json(folder / METRICS)
    return all(found.get(name) == value for name, value in _origin(recipe, seed).items())


def _write(model: PreTrainedModel, folder: Path) -> None:
    """As transformers does, without its progress bars among ours."""
    stock = load(model)
    write_json(folder / "config.json", stock.config)
    write_weights(folder, stock.weights, stored_as=stock.stored_as)


def _origin(recipe: TrainingRecipe, seed: int) -> dict[str, Any]:
    """All that the weights depend on. Python's version is part of it: its documentation is the data."""
    return {"schema": SCHEMA, "recipe": asdict(recipe), "seed": seed, "versions": {**versions(), "python": platform.python_version()}}


def _fresh(recipe: TrainingRecipe, seed: int) -> PreTrainedModel:
    import transformers

    kind = getattr(transformers, recipe.architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(kind.config_class(**recipe.config))


def _fit(model: PreTrainedModel, batches: Iterator[Batch], schedule: Schedule, progress: Progress | None) -> list[float]:
    optimizer, losses = _optimizer(model, schedule), []
    model.train()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(schedule, step)
        loss = model(**next(batches)).loss
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        losses.append(loss.item())
        if progress:
            progress(f"loss {losses[-1]:.3f}")
    model.eval()
    return losses


def _optimizer(model: PreTrainedModel, schedule: Schedule) -> torch.optim.AdamW:
    """Matrices decay; gains and biases do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": schedule.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=schedule.rate, betas=BETAS)


def _rate(schedule: Schedule, step: int) -> float:
    if step < schedule.warmup:
        return schedule.rate * (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup)
    return schedule.rate * (1 + math.cos(math.pi * done)) / 2
