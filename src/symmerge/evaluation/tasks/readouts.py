"""Readouts of language models, classifiers and regressions.

Sums are exactly rounded, so that the order of samples does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symmerge.errors import DataError
from symmerge.evaluation.tasks.base import IGNORED, UNLABELLED, Batch, Columns, Readout
from symmerge.evaluation.tasks.metrics import accuracy, f1, matthews, spearman


def _inputs(batch: Batch) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def _column(tensor: Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


def _mean(column: np.ndarray) -> float:
    return math.fsum(column) / len(column)


def _mean_probability(predictions: Sequence[Tensor]) -> Tensor:
    """Log of the mean probability, from log-probabilities."""
    return torch.logsumexp(torch.stack(list(predictions)), 0) - math.log(len(predictions))


@final
@dataclass(frozen=True)
class TokenReadout(Readout):
    """Loss per token of a language model; causal ones predict the next token.

    `characters_per_token` is the mean over predicted tokens, if known. A `decoder` predicts the
    next token as well, but its labels stand where they are predicted.
    """

    causal: bool
    characters_per_token: float | None = None
    decoder: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        if not (self.causal or self.decoder):
            return ("loss", "pseudo_perplexity")
        bits = ("bits_per_character",) if self.characters_per_token else ()
        return ("loss", "perplexity", *bits)

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        """Log-probability of each label; 0 where there is none."""
        outputs = module(**_inputs(batch)).items()
        logits = next(value for key, value in outputs if "logits" in key and value.ndim == 3)
        labels = self._labels(batch)
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
        )
        return -loss.view_as(labels)

    def _labels(self, batch: Batch) -> Tensor:
        """Labels at the positions that predict them: for causal models, one earlier."""
        labels = batch["labels"]
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED) if self.causal else labels

    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        return _mean_probability(predictions)

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        return {
            "loss": _column(-prediction.double().sum(1)),
            "tokens": _column((self._labels(batch) != IGNORED).sum(1)),
        }

    def summary(self, columns: Columns) -> dict[str, float]:
        loss = math.fsum(columns["loss"]) / int(columns["tokens"].sum())
        # 2 to the mean of -log2 p is e to the mean of -log p.
        metrics = {"loss": loss, self.metrics[1]: math.exp(loss) if loss < 700 else math.inf}
        if self.characters_per_token:
            metrics["bits_per_character"] = loss / math.log(2) / self.characters_per_token
        return metrics


class _ClassProbabilities(Readout):
    """Prediction and ensemble shared by classifiers: log-probabilities of classes."""

    @final
    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        return module(**_inputs(batch))["logits"].float().log_softmax(-1)

    @final
    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        return _mean_probability(predictions)


def _class_loss(prediction: Tensor, batch: Batch) -> np.ndarray:
    return _column(-prediction.gather(1, batch["labels"][:, None])[:, 0])


@final
@dataclass(frozen=True)
class ImageReadout(_ClassProbabilities):
    """Image classification: loss, accuracy and top-5 accuracy."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy", "top5")

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        likeliest = prediction.topk(min(5, prediction.shape[1])).indices == batch["labels"][:, None]
        return {
            "loss": _class_loss(prediction, batch),
            "accuracy": _column(likeliest[:, 0]),
            "top5": _column(likeliest.any(1)),
        }

    def summary(self, columns: Columns) -> dict[str, float]:
        return {name: _mean(columns[name]) for name in self.metrics}


@final
@dataclass(frozen=True)
class UnlabelledReadout(_ClassProbabilities):
    """Inputs without labels: predictions can be compared, but there is no loss."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        raise DataError(UNLABELLED)

    def summary(self, columns: Columns) -> dict[str, float]:
        raise DataError(UNLABELLED)


@final
@dataclass(frozen=True)
class ClassReadout(_ClassProbabilities):
    """Text classification: loss, accuracy, F1 and Matthews' correlation."""

    classes: int

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy", "f1", "matthews")

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        return {
            "loss": _class_loss(prediction, batch),
            "predicted": _column(prediction.argmax(1)),
            "label": _column(batch["labels"]),
        }

    def summary(self, columns: Columns) -> dict[str, float]:
        predicted, labels = columns["predicted"], columns["label"]
        return {
            "loss": _mean(columns["loss"]),
            "accuracy": accuracy(predicted, labels),
            "f1": f1(predicted, labels, self.classes),
            "matthews": matthews(predicted, labels, self.classes),
        }


@final
@dataclass(frozen=True)
class ValueReadout(Readout):
    """Text regression: mean squared error and Spearman's correlation."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "spearman")

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        return module(**_inputs(batch))["logits"].float()[:, 0]

    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(predictions)).mean(0)

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        return {
            "loss": _column((prediction - batch["labels"]).square()),
            "predicted": _column(prediction),
            "label": _column(batch["labels"]),
        }

    def summary(self, columns: Columns) -> dict[str, float]:
        return {
            "loss": _mean(columns["loss"]),
            "spearman": spearman(columns["predicted"], columns["label"]),
        }
