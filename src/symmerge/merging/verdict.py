"""Is a merge any good? Its loss beside its parents', their plain average's and their ensemble's.

On data if there is any, else on text that the parents sample, or on synthetic images, where their
ensemble gives the answers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from symmerge.aligning.aligned import Aligned
from symmerge.aligning.folders import AlignedFolder
from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.aligning.many import AlignedMany
from symmerge.checkpoints.card import public_name
from symmerge.checkpoints.memory import free_memory
from symmerge.errors import MismatchError, SymmergeError, SymmergeWarning
from symmerge.evaluation.results import LinePoint
from symmerge.evaluation.tasks import SELF_SOURCES, Task, task_of
from symmerge.evaluation.tasks.catalog import TASKS
from symmerge.merging.combining import normalised_weights
from symmerge.merging.measuring import Judged, Judging, MeasuredModel, judging_on, letter, measure
from symmerge.merging.verdict_results import (
    AVERAGE,
    MERGE,
    PARENT,
    UNHEALED,
    MergeVerdict,
    SkillRecord,
    VerdictRow,
)
from symmerge.merging.verdict_words import conclude, with_better_place
from symmerge.models.interpolation import interpolate, mean
from symmerge.models.model import Model, device_of
from symmerge.models.progress import Phase, ProgressLike, reporter
from symmerge.symmetry.groups.linalg import one_thread

MEMORY = 1.5  # of a model in float32, for its activations, too
ONE_THREAD = 200_000_000  # parameters
BETWEEN, LINE_PARAMETERS = (0.25, 0.5, 0.75), 500_000_000
LINES = "aligned_line", "plain_line"


def judge(
    merged: ModelLike,
    parents: Sequence[ModelLike],
    data: str | Task | None = None,
    *,
    skills: Sequence[str] = (),
    weights: Sequence[float] | None = None,
    aligned: Sequence[Model] = (),
    plain: bool = True,
    unhealed: Model | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressLike = None,
) -> MergeVerdict:
    """Measure a merge beside its parents: `judge(merged, [a, b], "books.txt")`.

    Without data it is measured on text that the parents sample, each parent's apart, or on
    synthetic images; `skills` are data measured apart, beside `data` or instead of it. `weights`
    are those of the parents in their plain average (not `plain`: none). Of two `aligned` models the
    line between them is measured, too, and `unhealed` is what a healed merge was before. One model
    at a time is in memory.
    """
    result, sources = open_model(merged), [open_model(parent) for parent in parents]
    if reason := cannot_judge(result, data or next(iter(skills), None), device):
        raise MismatchError(f"{result.where} cannot be judged: {reason}")
    tell = reporter(progress)
    tell(Phase("comparing the merge with its parents"))
    judged = _judged(result, sources, weights, plain)
    if unhealed is not None:
        judged.insert(-1, Judged("merge before healing", UNHEALED, unhealed))
    judged += _lines(sources, aligned, plain)
    # The same bytes whatever the number of threads; of a large model that would take too long.
    with one_thread() if result.parameters < ONE_THREAD else nullcontext():
        how = {"seed": seed, "device": device, "progress": tell}
        judging = judging_on(sources, data, skills, **how)  # type: ignore[arg-type]
        measured = measure(judged, judging, device_of(device), tell)
    shown = [one for one in measured if one.kind not in LINES]
    rows = [VerdictRow(one.name, one.kind, one.metrics) for one in shown]
    verdict = conclude(judging.task.to_record(), rows, _skills(judging, shown))
    lines = {kind: _line(measured, kind) for kind in LINES}
    return with_better_place(replace(verdict, **lines))


def cannot_judge(merged: Model, data: str | Task | None, device: str = "cpu") -> str | None:
    """Why a merge cannot be measured, if so."""
    purposes = {one for kind in TASKS.values() for one in kind.purposes}
    if not merged.stock:
        return "it is not a stock checkpoint"
    if merged.spec.task not in purposes:
        return f"no task measures a {merged.spec.architecture}"
    if data is None and task_of(merged) not in SELF_SOURCES:
        return "a text classifier needs labelled data: give --data"
    needed, free = MEMORY * 4 * merged.parameters, free_memory(device_of(device))
    if needed > free:
        return f"that takes {needed / 1e9:.0f} GB of memory, but only {free / 1e9:.0f} GB are free"
    return None


def judge_alignment(
    result: Aligned | AlignedMany | AlignedFolder | None,
    merged: Model,
    models: Sequence[Model],
    data: str | Task | None = None,
    **how: Any,
) -> MergeVerdict | None:
    """The verdict on a merge of what was aligned (None: of `models` as they are).

    None, with a warning, where it cannot be measured: without data, a merge does not fail for want
    of a verdict. `how` is passed to `judge`.
    """
    reason = cannot_judge(merged, data, how["device"])
    if reason is None:
        try:
            parents, more = parents_of(result, models)
            return judge(merged, parents, data, **more, **how)
        except SymmergeError as error:  # a tokenizer that cannot be opened, logits that overflow
            if data is not None:
                raise
            reason = str(error)
    warnings.warn(f"the merge was not measured: {reason}", SymmergeWarning, stacklevel=2)
    return None


def parents_of(
    result: Aligned | AlignedMany | AlignedFolder | None, models: Sequence[Model]
) -> tuple[Sequence[Model], dict[str, Any]]:
    """What a merge is compared with, and more options of `judge`."""
    if result is None:
        return models, {}
    if isinstance(result, AlignedFolder):  # what they were before is not there
        return result.models, {"aligned": result.models, "plain": False}
    if isinstance(result, AlignedMany):
        return [models[number] for number in result.universe.members], {}
    # B with A's vocabulary is what can be compared.
    return result.models if result.shared else models, {"aligned": result.models}


def _skills(judging: Judging, measured: Sequence[MeasuredModel]) -> tuple[SkillRecord, ...]:
    return tuple(
        SkillRecord(
            name,
            task.to_record(),
            tuple(VerdictRow(one.name, one.kind, one.skills[at]) for one in measured),
        )
        for at, (name, task) in enumerate(judging.skills.items())
    )


def _judged(
    merged: Model, parents: Sequence[Model], weights: Sequence[float] | None, plain: bool
) -> list[Judged]:
    judged = [
        Judged(f"{letter(at)}: {public_name(parent.where)}", PARENT, parent)
        for at, parent in enumerate(parents)
    ]
    if plain and len({parent.spec.fingerprint for parent in parents}) == 1:
        shares = normalised_weights(parents, weights)
        judged.append(Judged("plain average", AVERAGE, mean(parents, shares)))
    return [*judged, Judged("merge", MERGE, merged)]


def _lines(parents: Sequence[Model], aligned: Sequence[Model], plain: bool) -> list[Judged]:
    """Places between two models, aligned and as they were; large models are spared."""
    if len(aligned) != 2 or aligned[0].parameters > LINE_PARAMETERS:
        return []
    pairs = {"aligned_line": aligned}
    if plain and len({parent.spec.fingerprint for parent in parents}) == 1:
        pairs["plain_line"] = parents
    return [
        Judged(f"{t}", kind, interpolate(pair[0], pair[1], t))
        for kind, pair in pairs.items()
        for t in BETWEEN
    ]


def _line(measured: Sequence[MeasuredModel], kind: str) -> tuple[LinePoint, ...] | None:
    """The line with its ends, which are the parents."""
    between = {float(row.name): row.metrics for row in measured if row.kind == kind}
    if not between:
        return None
    a, b = (row.metrics for row in measured if row.kind == PARENT)
    return tuple(LinePoint(t, between.get(t, a if t < 0.5 else b)) for t in (0.0, *BETWEEN, 1.0))
