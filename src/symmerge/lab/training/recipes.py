"""Every training recipe by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from symmerge.errors import MismatchError
from symmerge.lab.training.embedded import EMBEDDED
from symmerge.lab.training.published import PUBLISHED
from symmerge.lab.training.recipe import Schedule, TrainingRecipe, with_changes

TRAINING: Mapping[str, TrainingRecipe] = MappingProxyType({**EMBEDDED, **PUBLISHED})
DEMO: Mapping[str, TrainingRecipe] = MappingProxyType(
    {name: TRAINING[name] for name in ("vit-digits", "gpt2-docs")}
)
"""Recipes of the demo."""
SKILLS: Mapping[str, TrainingRecipe] = MappingProxyType(
    {name: TRAINING[name] for name in ("gpt2-docs", "gpt2-code")}
)
"""Recipes of the demo's models with different skills."""


def training_recipe(name: str) -> TrainingRecipe:
    """One of `TRAINING`; an unknown name is an error that lists them."""
    if name not in TRAINING:
        raise MismatchError(
            f"no training recipe called '{name}': choose one of {', '.join(TRAINING)};"
            " symmerge train --list describes them"
        )
    return TRAINING[name]


__all__ = [
    "DEMO",
    "SKILLS",
    "TRAINING",
    "Schedule",
    "TrainingRecipe",
    "training_recipe",
    "with_changes",
]
