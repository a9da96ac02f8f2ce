"""transport.json: what was carried, how, and how much of it arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from symmerge.checkpoints.json_results import Record, ResultFile
from symmerge.evaluation.results import Metrics, TaskRecord

BASE, TUNED, OTHER, CARRIED = KINDS = "base", "tuned", "other", "carried"
ARRIVED, SOME = 0.5, 0.15  # share of the gap to TUNED that is closed


@dataclass(frozen=True)
class TransportRow(Record):
    """One model that was measured."""

    name: Annotated[str, "For people: `TUNED: news-s0`."]
    kind: Annotated[str, "`base`, `tuned`, `other` or `carried`."]
    metrics: Annotated[Metrics, "Value of each metric; `loss` is one of them."]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a row of kind {self.kind[:40]!r}")
        if "loss" not in self.metrics:
            raise ValueError("a row without a loss")


@dataclass(frozen=True, kw_only=True, repr=False)
class TransportVerdict(ResultFile):
    """OTHER before and after transport, beside BASE and TUNED."""

    SCHEMA, WRITER = "symmerge.transport/1", "symmerge transport"

    task: Annotated[TaskRecord, "What was measured: data, or inputs that TUNED makes."]
    rows: Annotated[tuple[TransportRow, ...], "Every model that was measured."]
    share: Annotated[
        float | None,
        "Share of the gap in loss between OTHER and TUNED that is closed; null if there is none.",
    ]
    verdict: Annotated[str, "`arrived`, `partly`, `lost`, or `unknown` (no gap to close)."]
    sentences: Annotated[tuple[str, ...], "The verdict in plain words."]
    method: Annotated[str, "How OTHER was aligned to BASE."]
    learned: Annotated[int, "Steps in which the way of carrying was learned; 0: not at all."]
    healed: Annotated[
        int, "Steps in which what arrived learned TUNED's answers; 0: not at all."
    ] = 0
    scales: Annotated[Mapping[str, float], "The factor of each tensor's change, where not one."]

    def __repr__(self) -> str:
        losses = ", ".join(f"{row.name} {row.metrics['loss']:.3f}" for row in self.rows)
        return f"TransportVerdict({self.verdict}: {self.sentences[0]}\n  losses: {losses})"

    def table(self) -> list[dict[str, object]]:
        """The rows for a printed table."""
        return [
            {"model": row.name, **{name.replace("_", " "): row.metrics[name] for name in names}}
            for row in self.rows
            for names in [[key for key in row.metrics if key in ("loss", *self.task.metrics)]]
        ]


def grade(losses: Mapping[str, float]) -> tuple[float | None, str, str]:
    """The share that arrived, a word for it, and a sentence."""
    gap = losses[OTHER] - losses[TUNED]
    if gap <= 0.01:
        sentence = "OTHER is already as good as TUNED here: there is no gap to close."
        return None, "unknown", sentence
    share = (losses[OTHER] - losses[CARRIED]) / gap
    if share < 0:
        sentence = "Nothing of what TUNED learned has arrived: OTHER does worse with the change."
        return share, "lost", sentence
    word = "arrived" if share >= ARRIVED else "partly" if share >= SOME else "lost"
    what = {
        "arrived": "Most of what TUNED learned has arrived",
        "partly": "Part of what TUNED learned has arrived",
        "lost": "Little or nothing of what TUNED learned has arrived",
    }[word]
    return share, word, f"{what}: {share:.0%} of the gap between OTHER and TUNED is closed."
