"""symmerge.json: where a model came from, what was done to it, and how it was checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from symmerge.checkpoints.json_results import INLINE, OMIT, Record, ResultFile


@dataclass(frozen=True)
class Parent(Record):
    """One of the models that were merged."""

    where: Annotated[str, "Folder or hub name."]
    sha256: Annotated[str, "Hash of the weights and the config."]
    weight: Annotated[float, "Its share of the mean."]
    steps: Annotated[tuple[HistoryStep, ...], "What was done to it before."]
    license: Annotated[str | None, OMIT, "As its card names it."] = None


@dataclass(frozen=True)
class HistoryStep(Record):
    """One step of a model's history: a canonical step, an alignment, a merge."""

    step: Annotated[str, "Name of the step."]
    what: Annotated[str, "The step in a sentence."]
    parents: Annotated[tuple[Parent, ...] | None, OMIT, "Of a merge."] = None
    evidence: Annotated[Mapping[str, object] | None, OMIT, "That the parents fit together."] = None
    details: Annotated[Mapping[str, object], INLINE, "Settings and results of the step."] = field(
        default_factory=dict
    )


@dataclass(frozen=True, repr=False)
class Verdict(Record):
    """How far two models' logits differ, and whether rounding explains it."""

    same: Annotated[bool, "Whether rounding explains all differences, and settings agree."]
    difference: Annotated[float, "|logits A - logits B| over |logits A|."]
    largest: Annotated[float, "Largest difference of a logit."]
    rounding: Annotated[float, "The difference that one more rounding of the weights makes."]
    units: Annotated[
        float, "Worst output, place or column, in units of what rounding explains: at most 1."
    ]
    tolerance: Annotated[float | None, "For `difference`, if one was given; it replaces `units`."]
    where: Annotated[str, "Where `units` was found."]
    settings: Annotated[tuple[str, ...], "Settings of the configs that differ."]
    dtype: Annotated[str, "The precision computed in."]
    inputs: Annotated[str, "Which inputs were compared."]
    tensors: Annotated[
        int | None, OMIT, "Tensors compared with a transport computed again, by the gate."
    ] = None

    def __repr__(self) -> str:
        return (
            f"Verdict(same={self.same}, difference={self.difference:.2e},"
            f" rounding={self.rounding:.2e}, units={self.units:.3g},\n  {self.where})"
        )


@dataclass(frozen=True)
class Provenance(ResultFile):
    """The content of symmerge.json, which travels with every written checkpoint."""

    SCHEMA: ClassVar[str] = "symmerge.provenance/1"
    WRITER: ClassVar[str] = "symmerge merge"

    source: Annotated[str, "The model it was made from."]
    source_sha256: Annotated[str, "Hash of that model's weights and config."]
    architecture: Annotated[str, "Class of the model."]
    stock: Annotated[bool, "Whether transformers loads it."]
    family: Annotated[str, "The table it was read with."]
    spec_sha256: Annotated[str, "The fingerprint of its table."]
    steps: Annotated[tuple[HistoryStep, ...], "What was done, in order."]
    verified: Annotated[Verdict | None, "How it was checked; null where the function changed."]
    versions: Annotated[Mapping[str, str], "Versions of what can change a number."]
    task: Annotated[str, "What its head is for, as `causal-lm`."] = ""
    license: Annotated[str | None, OMIT, "As the source's card names it."] = None
