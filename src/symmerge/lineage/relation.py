"""What the evidence says: which kind of relation, which is the parent, in plain words.

The rules look at figures that were measured on relatives made on purpose (docs/kinship.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symmerge.lineage.likeness import LikenessCell, by_layer, typical
from symmerge.lineage.results import LayerEvidence, Relation
from symmerge.lineage.traces import Traces

SURE = 1e-3  # p-value below which models count as related
APART = 0.3  # how much more alike borrowed layers are than the others
EXACT = 1e-3  # what is left of the weights, relative, where only rounding may be between them
COPIED = 0.03  # beyond this, more than a little noise
MIXED = 0.75  # slope: fine-tunes keep more of their base, merges at equal parts .5 to .73
UNKNOWN = "cannot say"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about a pair; `zeros` and `grids` say it of A and of B, as stored."""

    names: tuple[str, str]
    p: float
    p_order: float | None
    layers: tuple[LayerEvidence, ...]
    cells: tuple[LikenessCell, ...]
    traces: Traces | None = None
    zeros: tuple[bool, bool] = (False, False)
    grids: tuple[bool, bool] = (False, False)
    widened: str = ""
    same: bool = False


@dataclass(frozen=True)
class Finding:
    """The kind of relation, the parent (`a`, `b`, `cannot say`), the slope, and sentences."""

    relation: Relation
    parent: str
    slope: float
    sentences: tuple[str, ...]


def find_relation(facts: Facts) -> Finding:
    """The first kind of relation that the facts support."""
    a, b = facts.names
    chance = f"p = {facts.p:.2g}"
    if facts.p >= SURE:
        return _unrelated(facts, chance)
    borrowed = [one.layer for one in facts.layers if one.p < SURE]
    cells = by_layer(facts.cells)
    inside = [cell for layer in borrowed for cell in cells.get(layer, [])] or list(facts.cells)
    slope, cosine = typical(inside, "slope"), typical(inside)
    related = f"{a} and {b} are related ({chance})"
    relation, parent, what = _kind(facts, borrowed, slope, cosine)
    sentences = [f"{related}: {what}"]
    if facts.widened:
        sentences.append(f"{facts.widened} is the narrower one; it was widened to be compared.")
    sentences.append(_direction(parent, facts.names))
    return Finding(relation, parent, slope, tuple(sentences))


def _unrelated(facts: Facts, chance: str) -> Finding:
    a, b = facts.names
    limits = (
        "Distillation, very long retraining and strong noise leave no trace in weights: this does"
        " not prove independence."
    )
    if facts.p_order is not None and facts.p_order < SURE:
        said = (
            f"The units of {b} are in the same order as those of {a} (p = {facts.p_order:.2g}), but"
            f" their weights are no more alike than those of strangers ({chance}): one was"
            " aligned to the other, or started from the same seed and learned something else."
        )
        return Finding("same coordinates", UNKNOWN, 0.0, (said, limits))
    said = f"No relation between the weights of {a} and {b} was found ({chance})."
    return Finding("none", UNKNOWN, 0.0, (said, limits))


def _kind(
    facts: Facts, related: Sequence[int], slope: float, cosine: float
) -> tuple[Relation, str, str]:
    a, b = facts.names
    strangers = [one.layer for one in facts.layers if one.pairs and one.p >= SURE]
    sources = [one.source for one in facts.layers if one.p < SURE]
    if len({*sources}) < len(sources):
        twice = sorted({at for at in sources if sources.count(at) > 1})
        return (
            "deeper",
            "a",
            f"{b} was made deeper from layers of {a}; used more than once: {_list(twice)}.",
        )
    if strangers and related and _stands_out(facts, related, strangers):
        return (
            "layers borrowed",
            UNKNOWN,
            f"they share layers {_list(related)}, but not {_list(strangers)} (numbered as in {b}).",
        )
    if facts.same:
        return "same function", UNKNOWN, "they are one function in different coordinates."
    for is_so, kind, parents, what in _stored(facts):
        if is_so:
            return kind, parents, what
    if facts.traces and facts.traces.size < COPIED:
        return "copy", UNKNOWN, f"one is a copy of the other, changed by {facts.traces.size:.1%}."
    if slope < MIXED:
        return (
            "merge",
            UNKNOWN,
            f"about {max(slope, 0):.0%} of {a} is in {b}: a merge with something else, or long"
            " further training; give the other parents to get their shares.",
        )
    return (
        "fine-tune",
        UNKNOWN,
        f"one was trained further from the other, or both from one base (cosine {cosine:.2f}).",
    )


def _stored(facts: Facts) -> list[tuple[bool, Relation, str, str]]:
    """Pruning and rounding, which cannot be undone: they say which is the child."""
    a, b = facts.names
    left = facts.traces
    pruned, rounded = (left.pruned, left.rounded) if left else (False, False)
    zeros, grids = facts.zeros, facts.grids
    return [
        (zeros[1] and not zeros[0], "pruned", "a", f"{b} is {a}, pruned."),
        (zeros[0] and not zeros[1], "pruned", "b", f"{a} is {b}, pruned."),
        (pruned, "pruned", "a", f"{b} lacks the small weights of {a}: it was pruned."),
        (grids[1] and not grids[0], "quantised", "a", f"{b} is {a}, rounded to few values."),
        (grids[0] and not grids[1], "quantised", "b", f"{a} is {b}, rounded to few values."),
        (rounded, "quantised", "a", f"{b} differs from {a} as rounding to few values does."),
    ]


def _stands_out(facts: Facts, related: Sequence[int], strangers: Sequence[int]) -> bool:
    cells = by_layer(facts.cells)
    groups = (
        [cell for layer in layers for cell in cells.get(layer, [])]
        for layers in (related, strangers)
    )
    alike, others = (typical(group) for group in groups)
    return alike - others > APART


def _direction(parent: str, names: tuple[str, str]) -> str:
    if parent == UNKNOWN:
        return "The weights do not show which of them is the parent."
    child = names["ab".index(parent) - 1]
    return f"The parent is {names['ab'.index(parent)]}: what was done to {child} cannot be undone."


def _list(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
