"""Do models have the same table? Only then can their weights be compared tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from symmerge.errors import MismatchError
from symmerge.models.model import Model

SHOWN = 4  # differences between tables in one line


def stack_sizes(model: Model) -> list[int]:
    """How many layers each stack has, in the order of the table."""
    kinds = (name.rpartition(".")[0] for name in model.spec.spaces if name.startswith("ff."))
    return list(Counter(kinds).values())


def layer_count(model: Model) -> int:
    """How many layers a model has, counted by their feed-forward spaces."""
    return sum(stack_sizes(model))


def has_decoder(model: Model) -> bool:
    """Whether a decoder reads what an encoder of the same model made of other inputs."""
    crosses = any(name.startswith("head.cross.") for name in model.spec.spaces)
    return crosses and model.spec.encoded_as is None


def check_same_kind(models: Sequence[Model], verb: str = "merged") -> None:
    """Refuse models of another architecture than the first one's."""
    first, *others = models
    for other in others:
        kinds = first.spec.architecture, other.spec.architecture
        if kinds[0] != kinds[1]:
            raise MismatchError(
                f"{first.where} is a {kinds[0]} and {other.where} a {kinds[1]}: models of different"
                f" architectures cannot be {verb}; give models of the same one"
            )


def check_same_table(models: Sequence[Model], verb: str = "merged") -> None:
    """Refuse models whose tables differ from the first one's; the error lists the differences."""
    check_same_kind(models, verb)
    first, *others = models
    for other in others:
        # Layers differ alike: the first few differences tell them all.
        if lines := first.spec.differences(other.spec):
            more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
            raise MismatchError(
                f"{first.where} and {other.where} cannot be {verb}; they differ in:"
                f" {'; '.join(lines[:SHOWN])}{more}"
            )
