"""Do models have the same table? Only then can their weights be compared tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

from symmerge.models.model import Model


def check_same_table(models: Sequence[Model], verb: str = "merged") -> None:
    """Refuse models whose tables differ from the first one's, and say in what."""
    first, *others = models
    for other in others:
        first.spec.check_same(other.spec, f"{first.where} and {other.where} cannot be {verb}")
