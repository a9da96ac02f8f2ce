"""A greedy soup: the mean of those models of one basin that make each other better. Nothing is aligned here; give it aligned models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from symmerge.errors import MismatchError
from symmerge.evaluation.mixture import Mixture, Shares
from symmerge.evaluation.tasks import Task
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.models.interpolation import mean, merge_step
from symmerge.models.model import Model, Progress


def soup(
    models: Sequence[Model],
    task: Task,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> tuple[Model, list[dict[str, Any]]]:
    """The mean of some of the models, and what was tried: `soup([reference, *aligned], make_task("clm", "held-out.txt", models))`.

    From the best model on its own to the worst, each is added to the mean if the loss does not get worse. The models are read once; one copy more than
    there are models is in memory, in float32. The task's data chooses, so measure the result on other data: its loss here flatters it.
    """
    if len(models) < 2:
        raise MismatchError(f"{len(models)} model: a soup is made of two or more")
    check_same_tokenizers(models)
    mixture, say = Mixture(models, device=device), progress or (lambda _: None)
    alone = []
    for number, model in enumerate(models):
        alone.append(_loss(mixture, task, _equal([number], len(models))))
        say(f"{model.where}: loss {alone[-1]:.4f}")
    first, *others = sorted(range(len(models)), key=lambda number: alone[number])
    if alone[first] == math.inf:
        raise MismatchError(
            "no model has a finite loss in float32: check that each gives one on its own"
        )
    kept, loss = [first], alone[first]
    tried = [_row(models, first, alone, loss, True)]
    for number in others:
        found = _loss(mixture, task, _equal([*kept, number], len(models)))
        better = found <= loss
        tried.append(_row(models, number, alone, found, better))
        say(f"with {models[number].where}: loss {found:.4f}, {'kept' if better else 'left out'}")
        if better:
            kept, loss = [*kept, number], found
    return _merged([models[number] for number in sorted(kept)], task, tried, evidence or {}), tried


def _equal(chosen: Sequence[int], count: int) -> Shares:
    return tuple(1 / len(chosen) if number in chosen else 0.0 for number in range(count))


def _loss(mixture: Mixture, task: Task, shares: Shares) -> float:
    """A model that overflows is as bad as can be."""
    module = mixture.at(shares)
    batches = (
        {name: tensor.to(mixture.device) for name, tensor in batch.items()}
        for batch in task.batches
    )
    loss = task.summary(task.losses(module, batch) for batch in batches)["loss"]
    return loss if math.isfinite(loss) else math.inf


def _row(
    models: Sequence[Model], number: int, alone: Sequence[float], found: float, kept: bool
) -> dict[str, Any]:
    """JSON has no infinity."""
    own, together = (loss if loss < math.inf else None for loss in (alone[number], found))
    return {
        "model": number,
        "where": models[number].where,
        "own_loss": own,
        "loss": together,
        "kept": kept,
    }


def _merged(
    kept: Sequence[Model], task: Task, tried: list[dict[str, Any]], evidence: Mapping[str, Any]
) -> Model:
    shares = [1 / len(kept)] * len(kept)
    what = f"greedy soup of {len(kept)} of {len(tried)} models: " + ", ".join(
        model.where for model in kept
    )
    said = {f"model {row['model']} ({row['where']})": _words(row) for row in tried}
    told = {**evidence, "chosen by": f"{task.name} on {task.data}", **said}
    record = {
        "method": "soup",
        "weights": shares,
        "task": task.to_record().to_json(),
        "tried": tried,
        "evidence": told,
    }
    return kept[0].derive(mean(kept).weights, step=merge_step(kept, shares, what) | record)


def _words(row: dict[str, Any]) -> str:
    own, together = (
        "not finite" if loss is None else f"{loss:.4f}" for loss in (row["own_loss"], row["loss"])
    )
    return f"loss {own} alone, {together} in the soup, {'kept' if row['kept'] else 'left out'}"
