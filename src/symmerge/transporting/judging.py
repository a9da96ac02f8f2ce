"""How much arrived? The carried model beside OTHER, BASE and TUNED."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from symmerge.checkpoints.card import public_name
from symmerge.evaluation.tasks import Task
from symmerge.merging.measuring import Judged, judging_on, measure
from symmerge.merging.verdict import ONE_THREAD, cannot_judge
from symmerge.models.model import Model, device_of
from symmerge.models.progress import Notice, Phase, Progress
from symmerge.symmetry.groups.linalg import one_thread
from symmerge.transporting.transport_results import (
    BASE,
    CARRIED,
    OTHER,
    TUNED,
    TransportRow,
    TransportVerdict,
    grade,
)


def judge_transport(
    models: Mapping[str, Model],
    data: str | Task | None,
    *,
    method: str,
    learned: int,
    scales: Mapping[str, float],
    healed: int = 0,
    name: str | None = None,
    seed: int,
    device: str,
    progress: Progress,
) -> TransportVerdict | None:
    """Measure `base`, `tuned`, `other` and `carried` on data, or on inputs that TUNED makes.

    None where that is not possible: a classifier of texts without data. `name` is TUNED's.
    """
    tuned = models[TUNED]
    if reason := cannot_judge(models[CARRIED], data, device):
        progress(Notice(f"how much arrived was not measured: {reason}"))
        return None
    progress(Phase("measuring how much arrived"))
    with one_thread() if tuned.parameters < ONE_THREAD else nullcontext():
        judging = judging_on([tuned], data, seed=seed, device=device, progress=progress)
        names = {kind: f"{kind.upper()}: {public_name(models[kind].where)}" for kind in models}
        names |= {CARRIED: "carried"} | ({TUNED: f"TUNED: {name}"} if name else {})
        judged = [Judged(names[kind], kind, models[kind]) for kind in (BASE, TUNED, OTHER, CARRIED)]
        rows = measure(judged, judging, device_of(device), progress, parents=(TUNED,))
    losses = {row.kind: row.metrics["loss"] for row in rows}
    share, word, sentence = grade(losses)
    sentences = (sentence, *_about_inputs(judging.task))
    return TransportVerdict(
        task=judging.task.to_record(),
        rows=tuple(TransportRow(row.name, row.kind, row.metrics) for row in rows),
        share=share,
        verdict=word,
        sentences=sentences,
        method=method,
        learned=learned,
        healed=healed,
        scales={name: value for name, value in scales.items() if value != 1.0},
    )


def _about_inputs(task: Task) -> tuple[str, ...]:
    if task.data != "self":
        return ()
    return ("Measured on inputs that TUNED made itself: give --data to know how it does on yours.",)
