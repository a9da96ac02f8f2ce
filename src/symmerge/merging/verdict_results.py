"""verdict.json: how good a merge is, in numbers and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from symmerge.checkpoints.json_results import OMIT, Record, ResultFile
from symmerge.evaluation.results import LinePoint, Metrics, TaskRecord

KINDS = "parent", "average", "merge", "unhealed", "ensemble"
PARENT, AVERAGE, MERGE, UNHEALED, ENSEMBLE = KINDS


@dataclass(frozen=True)
class VerdictRow(Record):
    """One model that was measured."""

    name: Annotated[str, "For people: `A: seed-0`, `plain average`, `merge`, `ensemble`."]
    kind: Annotated[str, "`parent`, `average`, `merge`, `unhealed` (before healing) or `ensemble`."]
    metrics: Annotated[Metrics, "Value of each metric; `loss` is one of them."]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a row of kind {self.kind[:40]!r}")
        if "loss" not in self.metrics:
            raise ValueError("a row without a loss")

    @property
    def loss(self) -> float:
        return self.metrics["loss"]


@dataclass(frozen=True)
class SkillRecord(Record):
    """Every model on one kind of input: what one parent writes, or data of its own."""

    name: Annotated[str, "For people: `text of A`, or the name of the data."]
    task: Annotated[TaskRecord, "What was measured."]
    rows: Annotated[tuple[VerdictRow, ...], "The models of the verdict, in the same order."]

    def losses(self, kind: str) -> list[float]:
        """The losses of a kind of model."""
        return [row.loss for row in self.rows if row.kind == kind]


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeVerdict(ResultFile):
    """A merge beside its parents, their plain average and their ensemble."""

    SCHEMA, WRITER = "symmerge.verdict/1", "symmerge merge"

    task: Annotated[TaskRecord, "What was measured."]
    rows: Annotated[tuple[VerdictRow, ...], "Every model that was measured."]
    repaired: Annotated[
        float | None,
        "Share of the damage of plain averaging that is repaired; null where it does none.",
    ]
    verdict: Annotated[str, "`better`, `good`, `usable`, `poor`, or `unknown` (synthetic images)."]
    sentences: Annotated[tuple[str, ...], "The verdict in plain words."]
    skills: Annotated[
        tuple[SkillRecord, ...], OMIT, "The same on each skill: text of each parent, or `--skill`."
    ] = ()
    next: Annotated[tuple[str, ...], "Commands worth running next."] = ()
    aligned_line: Annotated[
        tuple[LinePoint, ...] | None, OMIT, "Of two models: the line between them, aligned."
    ] = None
    plain_line: Annotated[
        tuple[LinePoint, ...] | None, OMIT, "The line between them as they were."
    ] = None

    def __post_init__(self) -> None:
        if {PARENT, MERGE} - {row.kind for row in self.rows}:
            raise ValueError("it has no parents, or no merge")
        points = (*(self.aligned_line or ()), *(self.plain_line or ()))
        if any("loss" not in point.metrics for point in points):
            raise ValueError("a point without a loss")

    def __repr__(self) -> str:
        losses = ", ".join(f"{row.name} {row.loss:.3f}" for row in self.rows)
        return f"MergeVerdict({self.verdict}: {self.sentences[0]}\n  losses: {losses})"

    def of(self, kind: str) -> list[VerdictRow]:
        """The rows of a kind."""
        return [row for row in self.rows if row.kind == kind]

    def table(self) -> list[dict[str, object]]:
        """The rows for a printed table."""
        return [
            {
                "model": row.name,
                **_shown(row.metrics, self.task.metrics),
                **{f"on {skill.name}": skill.rows[at].loss for skill in self.skills},
            }
            for at, row in enumerate(self.rows)
        ]


def _shown(metrics: Metrics, names: Sequence[str]) -> dict[str, object]:
    return {name.replace("_", " "): metrics[name] for name in names}
