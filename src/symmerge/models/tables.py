"""Do models have the same table? Only then can their weights be compared tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

from symmerge.errors import MismatchError
from symmerge.models.model import Model


def layer_count(model: Model) -> int:
    """How many layers a model has, counted by their feed-forward spaces."""
    return sum(name.startswith("ff.") for name in model.spec.spaces)


def check_same_table(models: Sequence[Model], verb: str = "merged") -> None:
    """Refuse models whose tables differ from the first one's; the error lists the differences."""
    first, *others = models
    # A list, not a dict: models in memory share the name of their class.
    differences = [(other.where, first.spec.differences(other.spec)) for other in others]
    problems = [
        f"{first.where} and {where} cannot be {verb}; they differ in: {'; '.join(lines)}"
        for where, lines in differences
        if lines
    ]
    if problems:
        raise MismatchError(". ".join(problems))
