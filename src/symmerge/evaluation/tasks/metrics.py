"""The metrics of the GLUE benchmark. Where undefined (constant predictions), they are 0."""

from __future__ import annotations

import math

import numpy as np


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The share of correct predictions."""
    return float(np.mean(predicted == labels))


def f1(predicted: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """F1 of class 1 where there are two classes, else the mean over all classes."""
    averaged = [1] if classes == 2 else range(classes)
    return float(np.mean([_f1(predicted == number, labels == number) for number in averaged]))


def _f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    hits, wrong = int((predicted & labels).sum()), int((predicted ^ labels).sum())
    return 2 * hits / (2 * hits + wrong) if hits else 0.0


def matthews(predicted: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """Matthews' correlation for any number of classes (Gorodkin's generalisation)."""
    x, y = (np.bincount(side.astype(int), minlength=classes) for side in (predicted, labels))
    right, n = int((predicted == labels).sum()), len(labels)
    return _ratio(right * n - int(x @ y), (n * n - int(x @ x)) * (n * n - int(y @ y)))


def spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Spearman's rank correlation."""
    from scipy.stats import rankdata  # slow to import, and only needed here

    # Twice the ranks are integers, so sums are exact in any order.
    x, y = ((2 * rankdata(side)).astype(np.int64) for side in (predicted, labels))
    n, total = len(x), int(x.sum())  # x and y have the same sum of ranks
    return _ratio(
        n * int(x @ y) - total * total,
        (n * int(x @ x) - total * total) * (n * int(y @ y) - total * total),
    )


def _ratio(covariance: int, variances: int) -> float:
    return covariance / math.sqrt(variances) if variances else 0.0
