"""Every experiment by name; T, V and F are the three papers this library follows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from symmerge.lab.experiments import correlation, equivalence, generalized
from symmerge.lab.experiments.tables import Experiment

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {**generalized.EXPERIMENTS, **correlation.EXPERIMENTS, **equivalence.EXPERIMENTS}
)
