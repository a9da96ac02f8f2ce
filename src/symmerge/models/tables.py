"""Do models have the same table? Only then can their weights be compared tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

from symmerge.errors import MismatchError
from symmerge.models.model import Model


def check_same_table(models: Sequence[Model], verb: str = "merged") -> None:
    """Refuse models whose tables differ from the first one's: names each, and in what it differs."""
    first, *others = models
    problems = [
        f"{first.where} and {other.where} cannot be {verb}; they differ in: {'; '.join(differences)}"
        for other in others
        if (differences := first.spec.differences(other.spec))
    ]
    if problems:
        raise MismatchError(". ".join(problems))
