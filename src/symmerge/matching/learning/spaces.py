"""The spaces that may move, by the names that users give."""

from __future__ import annotations

from collections.abc import Sequence

from symmerge.errors import MismatchError
from symmerge.symmetry.spec import Spec, listing

SPACE_KINDS = {
    "residual": ("residual",),
    "heads": ("head", "query", "qk", "vo"),
    "ff": ("ff",),
    "classifier": ("pooled", "classifier", "transform"),
}
"""Parts of a model, and the spaces that belong to each."""


def choose_spaces(table: Spec, names: Sequence[str] | None) -> list[str]:
    """The hidden spaces named by parts of a model, kinds of spaces, or single spaces."""
    if names is None:
        return list(table.hidden)
    by_name = {name: _meant(table, name) for name in names}
    for name, spaces in by_name.items():
        if not spaces:
            parts = sorted(part for part in SPACE_KINDS if _meant(table, part))
            raise MismatchError(
                f"this model has no part called '{name}': choose one of {', '.join(parts)},"
                f" or of the spaces {listing(table.hidden)}"
            )
    chosen = set().union(*by_name.values())
    return [space for space in table.hidden if space in chosen]


def _meant(table: Spec, name: str) -> set[str]:
    kinds = set(SPACE_KINDS.get(name, (name,)))
    return {space for space in table.hidden if {space, space.partition(".")[0]} & kinds}
