"""A mean and how sure it is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import isfinite, nan, sqrt


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; one value has none. What overflowed stays infinite, and its error is not a number.

    >>> mean_and_error([1.0, 3.0]), mean_and_error([2.0]), mean_and_error([1.0, float("inf")])
    ((2.0, 1.0), (2.0, None), (inf, nan))
    """
    if not all(map(isfinite, values)):  # statistics.stdev fails for these
        return sum(values) / len(values), nan if len(values) > 1 else None
    return statistics.fmean(values), statistics.stdev(values) / sqrt(len(values)) if len(
        values
    ) > 1 else None
