"""symmerge.json: where a model came from, what was done to it, and how it was checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from symmerge.checkpoints.json_results import INLINE, OMIT, Record, ResultFile


@dataclass(frozen=True)
class Parent(Record):
    """One of the models that were merged."""

    where: str
    sha256: str
    weight: float
    steps: Annotated[tuple[HistoryStep, ...], "What was done to it before."]


@dataclass(frozen=True)
class HistoryStep(Record):
    """One thing that was done to a model: a canonical step, an alignment, a merge."""

    step: str
    what: str
    parents: Annotated[tuple[Parent, ...] | None, OMIT, "Of a merge."] = None
    evidence: Annotated[Mapping[str, object] | None, OMIT, "That the parents fit together."] = None
    details: Annotated[Mapping[str, object], INLINE, "Settings and results of the step."] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class Verdict(Record):
    """How far two models' logits are apart, and whether that is rounding."""

    same: Annotated[bool, "Whether the difference is within the tolerance."]
    difference: Annotated[float, "|logits A - logits B| over |logits A|."]
    largest: Annotated[float, "Largest difference of a logit."]
    tolerance: Annotated[float, "What counts as rounding in this dtype."]
    dtype: Annotated[str, "Number type of the comparison."]
    inputs: Annotated[str, "Which inputs were compared."]


@dataclass(frozen=True)
class Provenance(ResultFile):
    """The content of symmerge.json, which travels with every written checkpoint."""

    SCHEMA: ClassVar[str] = "symmerge.provenance/1"
    WRITER: ClassVar[str] = "symmerge merge"

    source: str
    source_sha256: str
    architecture: str
    stock: Annotated[bool, "Whether transformers loads it."]
    family: str
    spec_sha256: Annotated[str, "The fingerprint of its table."]
    steps: tuple[HistoryStep, ...]
    verified: Verdict | None
    versions: Mapping[str, str]
