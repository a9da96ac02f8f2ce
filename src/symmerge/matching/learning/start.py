"""The solution that learning starts from, by weights or by activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from symmerge.distributed import decided_by_first
from symmerge.evaluation.tasks.base import Task, subsample
from symmerge.evaluation.tasks.catalog import OWN
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.base import Solution, Trial
from symmerge.matching.evidence import Weighting
from symmerge.matching.optimization.loop import Saver
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.matching.search import Matching
from symmerge.matching.weights import WeightMatching
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model
from symmerge.models.progress import Progress

# Samples for an activation-matching start: more have not helped.
START_SAMPLES = {"clm": 24, "seq2seq": 24, "mlm": 48, "image": 256, "text": 256, OWN: 256}
Start = Matching | Alignment | Literal["identity"]


def default_start(data: Task | None, **options: Any) -> Matching:
    """Weight matching without data (self-generated inputs do not count), else by activations."""
    if data is None or data.data == "self":
        return WeightMatching(**options)
    return activation_start(data, **options)


def activation_start(data: Task | None, **options: Any) -> ActivationMatching:
    """Activation matching on a part of the data."""
    samples = data and subsample(data, START_SAMPLES[data.name])
    return ActivationMatching(data=samples, **options)


def first_solution(
    start: Start, a: Model, b: Model, progress: Progress, resume_file: ResumeFile | None
) -> Solution:
    """Solve the start for a pair."""
    if isinstance(start, Matching):
        return decided_by_first(
            lambda: start.solve(a, b, progress=progress, resume_file=resume_file)
        )
    identity = start == "identity"
    alignment = Alignment.identity(a.spec) if identity else Alignment(a.spec, start.elements)
    alignment.check()
    return Solution(alignment=alignment, converged=True)


def saver_with_start(file: ResumeFile | None, start: Solution) -> Saver[ResumeEntry] | None:
    """Saves states together with what the result will say of the start."""
    if file is None:
        return None
    known: dict[str, object] = {
        "weighting": asdict(start.weighting) if start.weighting else None,
        "trials": [trial.to_json() for trial in start.trials],
        "changes": start.changes,
    }

    def write(entry: ResumeEntry) -> None:
        file.write(replace(entry, record={**entry.record, "start": known}))

    return Saver(write)


def resumed_start(alignment: Alignment, record: Mapping[str, Any]) -> Solution:
    """The start of an interrupted run, as `saver_with_start` saved it."""
    start = record["start"]
    return Solution(
        alignment=alignment,
        weighting=Weighting(**start["weighting"]) if start["weighting"] else None,
        trials=tuple(map(Trial.from_json, start["trials"])),
        changes=tuple(start["changes"]),
    )
