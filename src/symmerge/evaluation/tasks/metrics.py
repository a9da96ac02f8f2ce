"""The numbers of the GLUE benchmark, from predictions and labels. Where one is undefined it is 0: nothing was told apart."""

from __future__ import annotations

import math

import numpy as np


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The share that is right."""
    return float(np.mean(predicted == labels))


def f1(predicted: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """The harmonic mean of precision and recall: of class 1 where there are two classes, else the mean over all."""
    chosen = [1] if classes == 2 else range(classes)
    return float(np.mean([_f1(predicted == one, labels == one) for one in chosen]))


def _f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    hits, wrong = int((predicted & labels).sum()), int((predicted ^ labels).sum())
    return 2 * hits / (2 * hits + wrong) if hits else 0.0


def matthews(predicted: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """The correlation of predicted and true classes, for any number of them (Gorodkin's)."""
    x, y = (np.bincount(side.astype(int), minlength=classes) for side in (predicted, labels))
    right, n = int((predicted == labels).sum()), len(labels)
    return _ratio(right * n - int(x @ y), (n * n - int(x @ x)) * (n * n - int(y @ y)))


def spearman(predicted: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of ranks."""
    from scipy.stats import rankdata  # slow to import, and only needed here

    # Twice the ranks are whole numbers, so that sums are exact in any order.
    x, y = ((2 * rankdata(side)).astype(np.int64) for side in (predicted, labels))
    n, total = len(x), int(x.sum())  # both sums of ranks are the same
    return _ratio(
        n * int(x @ y) - total * total,
        (n * int(x @ x) - total * total) * (n * int(y @ y) - total * total),
    )


def _ratio(covariance: int, variances: int) -> float:
    return covariance / math.sqrt(variances) if variances else 0.0
