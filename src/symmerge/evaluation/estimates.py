"""Means with their standard errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from typing import Annotated

from symmerge.checkpoints.json_results import Record


@dataclass(frozen=True)
class Estimate(Record):
    """A number, or the mean of several with its standard error.

    >>> Estimate.of([1.0, 3.0]), Estimate.of([2.0]).error, Estimate.of([1.0, float("inf")])
    (Estimate(mean=2.0, error=1.0), None, Estimate(mean=inf, error=nan))
    """

    mean: Annotated[float, "Mean."]
    error: Annotated[float | None, "Its standard error; null for a single value."] = None

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """From at least one value. An overflow makes the mean infinite and the error NaN."""
        has_error = len(values) > 1
        if not all(map(isfinite, values)):  # statistics.stdev fails for these
            return Estimate(sum(values) / len(values), nan if has_error else None)
        error = statistics.stdev(values) / sqrt(len(values)) if has_error else None
        return Estimate(statistics.fmean(values), error)
