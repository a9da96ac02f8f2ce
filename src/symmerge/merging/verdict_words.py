"""What the numbers of a verdict mean, in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean, pstdev

from symmerge.errors import MismatchError
from symmerge.evaluation.results import TaskRecord
from symmerge.matching.learning.targets import DISAGREE
from symmerge.merging.verdict_results import (
    AVERAGE,
    ENSEMBLE,
    MERGE,
    PARENT,
    UNHEALED,
    MergeVerdict,
    SkillRecord,
    VerdictRow,
)

# Loss above the mean of the parents, in nats: a perplexity 5 % and 65 % higher.
AS_GOOD, STILL_USABLE = 0.05, 0.5
ACCURACY_AS_GOOD, ACCURACY_USABLE = 0.01, 0.1  # below the mean of the parents
OVERFITTED = 0.5  # of the loss on other data: every parent's loss on what it may have been trained
SKILLS_APART = 0.25  # nats: on real data two seeds differ by .1, two domains by 1
WORTH = 0.1  # share of averaging's damage that is repaired, where a merge is poor
CLEARLY = 0.02  # nats between two places on the line
NO_DAMAGE = 0.02  # an average that costs less does no harm
UNLABELLED_METRICS = "loss", "agreement"


def conclude(
    task: TaskRecord, rows: Sequence[VerdictRow], skills: Sequence[SkillRecord] = ()
) -> MergeVerdict:
    """The verdict on measured rows, with those of each skill."""
    if not task.metrics:
        return _unknown(replace(task, metrics=UNLABELLED_METRICS), rows)
    losses = [row.loss for row in rows if row.kind == PARENT]
    merge = next(row for row in rows if row.kind == MERGE)
    average = next((row for row in rows if row.kind == AVERAGE), None)
    repaired = _repaired(losses, merge.loss, average.loss if average else None)
    by_loss = _grade(losses, merge.loss, own_text=task.data == "self")
    grade = max(by_loss, _grade_by_accuracy(rows), key=GRADES.index)
    sentences = [
        _about_merge(task, rows, grade),
        *([LESS_SURE] if grade != by_loss else []),
        *_about_average(task, rows, repaired),
        *_about_skills(skills),
        *_about_overfitting(task, rows, skills),
        *_about_data(task, len(losses)),
    ]
    return MergeVerdict(
        task=task,
        rows=tuple(rows),
        repaired=repaired,
        verdict=grade,
        sentences=tuple(sentences),
        skills=tuple(skills),
    )


def _unknown(task: TaskRecord, rows: Sequence[VerdictRow]) -> MergeVerdict:
    """Synthetic images tell too little: a merge that keeps 70 % of a ViT looked broken on them."""
    agreement = {row.kind: _value(task, row) for row in rows}
    merge, average = agreement[MERGE], agreement.get(AVERAGE)
    sentences = (
        "This merge cannot be judged without images like those it is meant for: give --data.",
        f"On {task.samples} synthetic images it agrees with the parents' ensemble on {merge}"
        + (f", their plain average on {average}." if average else "."),
    )
    return MergeVerdict(
        task=task, rows=tuple(rows), repaired=None, verdict="unknown", sentences=sentences
    )


def _repaired(parents: Sequence[float], merge: float, average: float | None) -> float | None:
    mean = fmean(parents)
    if average is None or not math.isfinite(average) or average - mean < NO_DAMAGE:
        return None
    return 1 - (merge - mean) / (average - mean)


def _grade(parents: Sequence[float], merge: float, *, own_text: bool) -> str:
    """Text sampled from the parents cannot say that a merge is better.

    Each parent is at home in its own half alone, the merge in both: one that looked better there
    (perplexity 61.0 against 62.3 and 62.0) was worse on real text (59.6 against 57.7 and 56.9).
    """
    excess = merge - fmean(parents)
    if merge < min(parents) and not own_text:
        return "better"
    if excess <= AS_GOOD:
        return "good"
    return "usable" if excess <= STILL_USABLE else "poor"


def _grade_by_accuracy(rows: Sequence[VerdictRow]) -> str:
    """A midpoint may have a lower loss than its parents and still be right less often."""
    if any("accuracy" not in row.metrics for row in rows):
        return "better"
    theirs = fmean(row.metrics["accuracy"] for row in rows if row.kind == PARENT)
    lost = theirs - next(row for row in rows if row.kind == MERGE).metrics["accuracy"]
    if lost <= ACCURACY_AS_GOOD:
        return "better"
    return "usable" if lost <= ACCURACY_USABLE else "poor"


LESS_SURE = (
    "The loss flatters it: the merge is less confident than its parents, but right less often."
)
GRADES = ("better", "good", "usable", "poor")  # from the best to the worst
JUDGEMENTS = {
    "better": "The merge is better than {all} of its parents",
    "good": "The merge is as good as its parents",
    "usable": "The merge works, but is worse than its parents",
    "poor": "This merge is not good: it is far worse than its parents",
}


def _about_merge(task: TaskRecord, rows: Sequence[VerdictRow], grade: str) -> str:
    parents = [row for row in rows if row.kind == PARENT]
    merge = next(row for row in rows if row.kind == MERGE)
    ensemble = next((row for row in rows if row.kind == ENSEMBLE), None)
    said = JUDGEMENTS[grade].format(all="both" if len(parents) == 2 else "all")
    theirs = " and ".join(_value(task, row) for row in parents)
    beside = f"; their ensemble {_value(task, ensemble)}" if ensemble else ""
    return f"{said}: {_metric(task)} {_value(task, merge)}, the parents' {theirs}{beside}."


def _metric(task: TaskRecord) -> str:
    """The metric people know: perplexity, accuracy or agreement, where there is one."""
    return _main(task).replace("_", " ")


def _main(task: TaskRecord) -> str:
    return [*task.metrics, *task.metrics][1]  # the loss, where there is nothing else


def _value(task: TaskRecord, row: VerdictRow) -> str:
    value = row.metrics[_main(task)]
    if _main(task) in ("accuracy", "agreement"):
        return f"{100 * value:.1f} %"
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _about_average(
    task: TaskRecord, rows: Sequence[VerdictRow], repaired: float | None
) -> list[str]:
    average = next((row for row in rows if row.kind == AVERAGE), None)
    if average is None:
        return []
    value = f"{_metric(task)} {_value(task, average)}"
    if repaired is None:
        return [f"Plain averaging does no harm here ({value})."]
    if repaired <= 0:
        return [f"It repairs none of what plain averaging breaks ({value})."]
    return [
        f"It repairs {100 * min(repaired, 1):.0f} % of what plain averaging breaks ({value}),"
        " measured in loss."
    ]


def check_worth(verdict: MergeVerdict | None) -> None:
    """Refuse a merge that is far worse than its parents, and no better than their plain average."""
    if verdict is None or verdict.verdict != "poor" or verdict.repaired is None:
        return
    if verdict.repaired < WORTH:
        raise MismatchError(
            f"{verdict.sentences[0]} {verdict.sentences[1]} Nothing was written: these models have"
            " too little in common for this effort; try --effort best, --data FILE or --heal 300,"
            " or write it as it is with --anyway"
        )


def _about_skills(skills: Sequence[SkillRecord]) -> list[str]:
    """Where each parent knows something that another does not, what the merge keeps of it."""
    if len(skills) < 2 or not differ(skills):
        return []
    said = [
        f"on {skill.name} the best parent has a loss of {min(skill.losses(PARENT)):.2f}, the worst"
        f" {max(skill.losses(PARENT)):.2f}, the merge {skill.losses(MERGE)[0]:.2f}"
        for skill in skills
    ]
    return [f"The parents have different skills: {'; '.join(said)}."]


def _about_overfitting(
    task: TaskRecord, rows: Sequence[VerdictRow], skills: Sequence[SkillRecord]
) -> list[str]:
    """Where all parents know one of the data alone: probably what they were trained on."""
    told = SkillRecord(task.data, task, tuple(rows))
    measured = [one for one in (told, *skills) if one.task.data != "self"]
    measured.sort(key=lambda one: fmean(one.losses(PARENT)))
    if len(measured) < 2:
        return []
    known, new = measured[0], measured[-1]
    pairs = zip(known.losses(PARENT), new.losses(PARENT), strict=True)
    if not all(low < OVERFITTED * high for low, high in pairs):
        return []
    return [
        f"Every parent has a loss of at most {max(known.losses(PARENT)):.2f} on {known.name}, and"
        f" of {min(new.losses(PARENT)):.2f} or more on {new.name}: if they were trained on the"
        " first, they are overfitted, and the other shows how good the merge is: it is"
        f" {_beside_parents(new)} there, {_beside_parents(known)} on the first."
    ]


def _beside_parents(skill: SkillRecord) -> str:
    excess = skill.losses(MERGE)[0] - fmean(skill.losses(PARENT))
    return f"{abs(excess):.2f} {'above' if excess > 0 else 'below'} their mean"


def with_better_place(verdict: MergeVerdict) -> MergeVerdict:
    """The verdict, with a place between the models where the loss is clearly lower, if any.

    It has to be lower than both models' own: else that place is only closer to one of them.
    """
    line, merge = verdict.aligned_line or (), verdict.of(MERGE)[0].loss
    best = min(line[1:-1], key=lambda point: point.metrics["loss"], default=None)
    if best is None or verdict.of(UNHEALED) or verdict.verdict == "unknown":
        return verdict
    loss = best.metrics["loss"]
    if merge - loss < CLEARLY or loss >= min(row.loss for row in verdict.of(PARENT)):
        return verdict
    said = f"At t = {best.t} the loss is lower, {loss:.3g} instead of {merge:.3g}: add -t {best.t}."
    return replace(verdict, sentences=(*verdict.sentences, said))


def differ(skills: Sequence[SkillRecord]) -> bool:
    """Whether the better parent is another one from skill to skill, and by far.

    Text sampled from a parent is always its own: there it takes more.
    """
    losses = [skill.losses(PARENT) for skill in skills]
    own = all(skill.task.data == "self" for skill in skills)
    apart = [
        pstdev([each[a] - each[b] for each in losses])
        for a, b in combinations(range(len(losses[0])), 2)
    ]
    return max(apart, default=0.0) > (DISAGREE if own else SKILLS_APART)


def _about_data(task: TaskRecord, parents: int) -> list[str]:
    if task.data != "self":
        return [f"Measured on {task.samples} samples of {task.data} that nothing was learned from."]
    which = "both models" if parents == 2 else "all models"
    return [
        f"Measured on {task.samples} rows of text sampled from {which}: enough to tell a broken"
        " merge from a working one, but small differences need real text: --data FILE."
    ]


def markdown(verdict: MergeVerdict, picture: str | None = None) -> str:
    """The verdict for a model card: sentences, a table, and a picture that lies beside it."""
    table = verdict.table()
    head = list(table[0])
    rows = [
        [value if isinstance(value, str) else f"{value:.4g}" for value in row.values()]
        for row in table
    ]
    lines = [" ".join(verdict.sentences), ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    if picture:
        lines += ["", f"![Loss between the parents, aligned and as they were]({picture})"]
    return "\n".join(lines)


def advice(
    verdict: MergeVerdict,
    command: str = "symmerge merge A B --out BETTER",
    out: str = "DIR",
    *,
    best: bool,
) -> MergeVerdict:
    """The verdict with what to do next; `best` says that nothing more can be learned.

    What is stored names no folder: it travels with the model.
    """
    commands = [] if best or verdict.verdict == "better" else [f"{command} --effort best"]
    if verdict.task.data == "self":
        commands.append(f"{command} --data FILE")
    return replace(verdict, next=(*commands, f"symmerge report {out}"))
