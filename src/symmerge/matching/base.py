"""What a solver returns: an alignment, and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

from symmerge.models.alignment import Alignment
from symmerge.observation.correlations import Correlations


@dataclass(frozen=True)
class Solution:
    """An alignment of B to A with how it was found.

    `objective` has one value per sweep and never increases (but where a published recipe pairs heads by another metric than their best bases);
    `by_space` is the part of the last one that each space's tensors hold; `tried` every weighting and start with its score; `interrupted` says
    that Ctrl-C ended the search and this is the best until then; `distance` how far the models are then apart; `correlations` how alike their
    features are before and after, where statistics were gathered; `relaxed` what a soft method found beside it, which is no symmetry.
    """

    alignment: Alignment
    objective: tuple[float, ...]
    by_space: Mapping[str, float]
    changes: tuple[int, ...]
    converged: bool
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    tried: tuple[Mapping[str, Any], ...] = ()
    interrupted: bool = False
    distance: float = nan
    correlations: Correlations | None = field(default=None, repr=False)
    relaxed: Alignment | None = field(default=None, repr=False)
