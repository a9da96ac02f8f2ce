"""kinship.json: whether two checkpoints are related, how, and the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Literal, get_args

from symmerge.checkpoints.json_results import Record, ResultFile
from symmerge.lineage.likeness import KINDS, LikenessCell

Relation = Literal[
    "same function",
    "copy",
    "fine-tune",
    "pruned",
    "quantised",
    "merge",
    "layers borrowed",
    "deeper",
    "same coordinates",
    "none",
]
RELATIONS: tuple[str, ...] = get_args(Relation)
UNRELATED = ("none", "same coordinates")


def short_names(a: str, b: str) -> tuple[str, str]:
    """Names of the folders, or the whole paths where these agree."""
    names = PurePath(a).name or a, PurePath(b).name or b
    names = names if names[0] != names[1] else (a, b)
    return names if names[0] != names[1] else ("A", "B")  # both in memory


@dataclass(frozen=True)
class LayerEvidence(Record):
    """The test of one layer: fair coins, if the models know nothing of one another."""

    layer: Annotated[int, "The layer of B."]
    source: Annotated[int, "The layer of A it was compared with."]
    wins: Annotated[float, "Pairs of units whose outgoing weights agree with the match."]
    pairs: Annotated[int, "All pairs tested; half of them agree by chance."]
    p: Annotated[float, "Probability of as many wins by chance."]


@dataclass(frozen=True, kw_only=True, repr=False)
class Kinship(ResultFile):
    """Are two checkpoints related, how, and by what evidence?"""

    SCHEMA, WRITER = "symmerge.kinship/1", "symmerge kinship"

    a: Annotated[str, "The first model."]
    b: Annotated[str, "The second, which was brought into the coordinates of the first."]
    related: Annotated[bool, "Whether `p` is below 0.001."]
    relation: Annotated[str, "Kind of relation, `none` without any."]
    parent: Annotated[str, "`a`, `b`, or `cannot say`."]
    p: Annotated[float, "P-value of independence; no disguise by a symmetry changes it."]
    p_order: Annotated[
        float | None, "P-value of the numbers of units as stored; null: not comparable."
    ]
    before: Annotated[float | None, "Median cosine of the matrices as stored; null: other tables."]
    after: Annotated[float, "Median over the cells, undisguised."]
    slope: Annotated[float, "How much of A is in B: median over the related layers."]
    layers: Annotated[tuple[LayerEvidence, ...], "The test of every layer of B."]
    cells: Annotated[tuple[LikenessCell, ...], "Every kind of tensors in every layer."]
    sentences: Annotated[tuple[str, ...], "The verdict in plain words."]

    def __post_init__(self) -> None:
        if self.relation not in RELATIONS or self.parent not in ("a", "b", "cannot say"):
            raise ValueError(f"relation {self.relation[:40]!r}, parent {self.parent[:40]!r}")
        if not self.sentences:
            raise ValueError("a verdict without words")

    def __repr__(self) -> str:
        return (
            f"Kinship({self.relation}, p = {self.p:.2g}, parent: {self.parent}):\n  "
            + (self.sentences[0])
        )

    @property
    def names(self) -> tuple[str, str]:
        """Names of A and of B for people."""
        return short_names(self.a, self.b)

    def table(self) -> list[dict[str, object]]:
        """The cells for a printed table: a row for every layer, a column for every kind."""
        rows: dict[int | None, dict[str, object]] = {}
        kinds = [kind for kind in KINDS if any(cell.kind == kind for cell in self.cells)]
        for cell in self.cells:
            name = "outside" if cell.layer is None else str(cell.layer)
            empty = {"layer": name, **dict.fromkeys(kinds)}
            rows.setdefault(cell.layer, empty)[cell.kind] = cell.cosine
        return list(rows.values())


@dataclass(frozen=True)
class ParentShare(Record):
    """How much of one model is in a merge."""

    model: Annotated[str, "The model."]
    share: Annotated[float, "Its share, by least squares in common coordinates."]
    p: Annotated[float, "P-value of its independence of the merge."]
    related: Annotated[bool, "Whether that is below 0.001."]


@dataclass(frozen=True, repr=False)
class MergeShares(ResultFile):
    """Of which models is one a merge, and with what shares?"""

    SCHEMA, WRITER = "symmerge.shares/1", "symmerge kinship"

    model: Annotated[str, "The model in question."]
    parents: Annotated[tuple[ParentShare, ...], "Every candidate; shares add up to one."]
    explained: Annotated[float, "Share of the model's squared weights that they explain together."]

    def __repr__(self) -> str:
        shares = ", ".join(f"{one.share:.2f} {one.model}" for one in self.parents)
        return f"MergeShares({self.model}: {shares};\n  {self.explained:.0%} explained)"


@dataclass(frozen=True)
class IndexMatch(Record):
    """One model of an index, beside the model in question."""

    model: Annotated[str, "Where it was, when it was added."]
    file: Annotated[str, "Its fingerprint."]
    related: Annotated[bool, "Whether `p` is below 0.001, divided by the models compared."]
    p: Annotated[float | None, "P-value of independence; null: cannot be compared."]
    wins: Annotated[float, "Pairs of units that agree."]
    pairs: Annotated[int, "Pairs tested."]
    note: Annotated[str, "Why it could not be compared."] = ""


@dataclass(frozen=True, repr=False)
class IndexMatches(ResultFile):
    """One model beside many, from their fingerprints; the most likely relative first."""

    SCHEMA, WRITER = "symmerge.index-matches/1", "symmerge kinship"

    model: Annotated[str, "The model in question."]
    matches: Annotated[tuple[IndexMatch, ...], "Every fingerprint of the index."]

    def __repr__(self) -> str:
        related = [one.model for one in self.matches if one.related]
        relatives = ", ".join(related) or "none"
        return f"IndexMatches({self.model}: related to {relatives}\n  of {len(self.matches)})"
