"""The readouts: tokens of language models, classes, and values. Sums are exactly rounded, so that no order of samples changes them."""

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


def _mean_of_probabilities(predictions: Sequence[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(list(predictions)), 0) - math.log(len(predictions))


@final
@dataclass(frozen=True)
class TokenReadout(Readout):
    """The loss per token of a language model, causal ones predicting the next token.

    `characters_per_token` is how much text a token that counts stands for, where that is known.
    """

    causal: bool
    characters_per_token: float | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        if not self.causal:
            return ("loss", "pseudo_perplexity")
        return (
            ("loss", "perplexity", "bits_per_character")
            if self.characters_per_token
            else ("loss", "perplexity")
        )

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        """The logarithm of the probability of each label; 0 where there is none."""
        logits = next(
            value
            for key, value in module(**_inputs(batch)).items()
            if "logits" in key and value.ndim == 3
        )
        labels = self._labels(batch)
        return -F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
        ).view_as(labels)

    def _labels(self, batch: Batch) -> Tensor:
        # Labels lie where their token is, as transformers has it; the prediction of a causal model lies one place before.
        return (
            F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED) if self.causal else batch["labels"]
        )

    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        return _mean_of_probabilities(predictions)

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        return {
            "loss": _column(-prediction.double().sum(1)),
            "tokens": _column((self._labels(batch) != IGNORED).sum(1)),
        }

    def summary(self, columns: Columns) -> dict[str, float]:
        loss = math.fsum(columns["loss"]) / int(columns["tokens"].sum())
        # 2 to the mean of -log2 p is e to the mean of -log p.
        found = {"loss": loss, self.metrics[1]: math.exp(loss) if loss < 700 else math.inf}
        if self.characters_per_token:
            found["bits_per_character"] = loss / math.log(2) / self.characters_per_token
        return found


def _class_log_probabilities(module: nn.Module, batch: Batch) -> Tensor:
    return module(**_inputs(batch))["logits"].float().log_softmax(-1)


def _class_loss(prediction: Tensor, batch: Batch) -> np.ndarray:
    return _column(-prediction.gather(1, batch["labels"][:, None])[:, 0])


@final
@dataclass(frozen=True)
class ImageReadout(Readout):
    """Loss, accuracy, and how often the true class is among the five likeliest."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy", "top5")

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        return _class_log_probabilities(module, batch)

    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        return _mean_of_probabilities(predictions)

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        likeliest = prediction.topk(min(5, prediction.shape[1])).indices == batch["labels"][:, None]
        return {
            "loss": _class_loss(prediction, batch),
            "accuracy": _column(likeliest[:, 0]),
            "top5": _column(likeliest.any(1)),
        }

    def summary(self, columns: Columns) -> dict[str, float]:
        return {name: math.fsum(columns[name]) / len(columns[name]) for name in self.metrics}


@final
@dataclass(frozen=True)
class UnlabelledReadout(Readout):
    """Inputs in no class: models can answer and be compared by their answers, but there is no loss."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        return _class_log_probabilities(module, batch)

    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        return _mean_of_probabilities(predictions)

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        raise DataError(UNLABELLED)

    def summary(self, columns: Columns) -> dict[str, float]:
        raise DataError(UNLABELLED)


@final
@dataclass(frozen=True)
class ClassReadout(Readout):
    """Text in classes: loss, accuracy, F1 and Matthews' correlation."""

    classes: int

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy", "f1", "matthews")

    def predict(self, module: nn.Module, batch: Batch) -> Tensor:
        return _class_log_probabilities(module, batch)

    def ensemble(self, predictions: Sequence[Tensor]) -> Tensor:
        return _mean_of_probabilities(predictions)

    def score(self, prediction: Tensor, batch: Batch) -> Columns:
        return {
            "loss": _class_loss(prediction, batch),
            "predicted": _column(prediction.argmax(1)),
            "label": _column(batch["labels"]),
        }

    def summary(self, columns: Columns) -> dict[str, float]:
        sides = columns["predicted"], columns["label"]
        loss = math.fsum(columns["loss"]) / len(columns["loss"])
        return {
            "loss": loss,
            "accuracy": accuracy(*sides),
            "f1": f1(*sides, self.classes),
            "matthews": matthews(*sides, self.classes),
        }


@final
@dataclass(frozen=True)
class ValueReadout(Readout):
    """Text with a value: the mean square error, and Spearman's correlation."""

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
            "loss": math.fsum(columns["loss"]) / len(columns["loss"]),
            "spearman": spearman(columns["predicted"], columns["label"]),
        }
