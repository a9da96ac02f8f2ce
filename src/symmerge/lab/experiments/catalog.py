"""Every experiment by name; t-, v- and f- stand for the three papers in docs/papers.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from symmerge.lab.experiments import correlation, equivalence, generalized, named, vits
from symmerge.lab.experiments.tables import Experiment

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        **generalized.EXPERIMENTS,
        **vits.EXPERIMENTS,
        **correlation.EXPERIMENTS,
        **equivalence.EXPERIMENTS,
        **named.EXPERIMENTS,
    }
)
