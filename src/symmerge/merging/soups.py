"""Greedy soups: the mean of the models that improve it. Nothing is aligned here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from symmerge.errors import MismatchError
from symmerge.evaluation.mixture import Mixture, Shares
from symmerge.evaluation.tasks import Task
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.models.interpolation import mean, merge_step
from symmerge.models.model import Model
from symmerge.models.progress import Progress


def soup(
    models: Sequence[Model],
    task: Task,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    evidence: Mapping[str, object] | None = None,
) -> tuple[Model, list[dict[str, object]]]:
    """A greedy soup, and a record of each attempt: `soup(result.models, task)`.

    From the best single model to the worst, each is added to the mean unless the loss gets worse.
    All models and one mean are held in memory in float32. The task's data is the selection data:
    its loss is optimistic, so measure the result on other data.
    """
    if len(models) < 2:
        raise MismatchError(f"{len(models)} model: a soup needs two or more")
    check_same_tokenizers(models)
    mixture, tell = Mixture(models, device=device), progress or (lambda _: None)
    alone = []
    for number, model in enumerate(models):
        alone.append(_loss(mixture, task, _equal([number], len(models))))
        tell(f"{model.where}: loss {alone[-1]:.4f}")
    first, *others = sorted(range(len(models)), key=lambda number: alone[number])
    if alone[first] == math.inf:
        raise MismatchError(
            "no model has a finite loss in float32: check that each gives one on its own"
        )
    members, best = [first], alone[first]
    rows = [_row(models, first, alone, best, True)]
    for number in others:
        loss = _loss(mixture, task, _equal([*members, number], len(models)))
        better = loss <= best
        rows.append(_row(models, number, alone, loss, better))
        tell(f"with {models[number].where}: loss {loss:.4f}, {'kept' if better else 'left out'}")
        if better:
            members, best = [*members, number], loss
    chosen = [models[number] for number in sorted(members)]
    return _merged(chosen, task, rows, evidence or {}), rows


def _equal(members: Sequence[int], count: int) -> Shares:
    return tuple(1 / len(members) if number in members else 0.0 for number in range(count))


def _loss(mixture: Mixture, task: Task, shares: Shares) -> float:
    """The loss; infinite for a model that overflows."""
    module = mixture.at(shares)
    batches = (
        {name: tensor.to(mixture.device) for name, tensor in batch.items()}
        for batch in task.batches
    )
    loss = task.summary(task.losses(module, batch) for batch in batches)["loss"]
    return loss if math.isfinite(loss) else math.inf


def _row(
    models: Sequence[Model], number: int, alone: Sequence[float], loss: float, kept: bool
) -> dict[str, object]:
    # JSON has no infinity.
    own, together = (value if value < math.inf else None for value in (alone[number], loss))
    where = models[number].where
    return {"model": number, "where": where, "own_loss": own, "loss": together, "kept": kept}


def _merged(
    models: Sequence[Model],
    task: Task,
    rows: list[dict[str, object]],
    evidence: Mapping[str, object],
) -> Model:
    shares = [1 / len(models)] * len(models)
    names = ", ".join(model.where for model in models)
    what = f"greedy soup of {len(models)} of {len(rows)} models: {names}"
    lines = {f"model {row['model']} ({row['where']})": _line(row) for row in rows}
    evidence = {**evidence, "chosen by": f"{task.name} on {task.data}", **lines}
    details = {
        "method": "soup",
        "weights": shares,
        "task": task.to_record().to_json(),
        "tried": rows,
    }
    step = merge_step(models, shares, what, evidence=evidence, details=details)
    return models[0].derive(mean(models).weights, step=step)


def _line(row: dict[str, object]) -> str:
    own, together = (
        "not finite" if loss is None else f"{loss:.4f}" for loss in (row["own_loss"], row["loss"])
    )
    return f"loss {own} alone, {together} in the soup, {'kept' if row['kept'] else 'left out'}"
