"""Every experiment by name: T, V and F are the three papers this library follows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from symmerge.errors import MismatchError
from symmerge.experiments import correlation, equivalence, generalized
from symmerge.experiments.tables import Experiment

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType({**generalized.EXPERIMENTS, **correlation.EXPERIMENTS, **equivalence.EXPERIMENTS})


def experiment(name: str) -> Experiment:
    """One of `EXPERIMENTS`; others are refused with the list."""
    if name not in EXPERIMENTS:
        raise MismatchError(
            f"no experiment called '{name}'. There are:\n" + "\n".join(f"  {known}: {found.about} ({found.paper})" for known, found in EXPERIMENTS.items())
        )
    return EXPERIMENTS[name]
