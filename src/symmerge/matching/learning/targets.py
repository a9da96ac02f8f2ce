"""What a merge should answer, from what its parents answer: their mean, or the one who knows.

Text of two kinds is not answered by the mean of two models of which one knows it. Each parent then
counts as much as it explains the text: `bayes` by the context so far (the exact ensemble of
authors), `author` by the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from symmerge.evaluation.tasks.base import IGNORED

Target = Literal["auto", "parents", "author", "bayes", "labels"]
BY_TEXT = "author", "bayes"
"""Targets that weigh the parents by how well each explains a text."""
DISAGREE = 1.0
"""`disagreement` from which parents have skills of their own: on text that they sample .5 to .7 for
two seeds of one data set, 1.9 for two data sets; on text of both .2 and 1.7 (docs/log.md)."""


def joint_answer(
    logits: Sequence[Tensor], target: Target, labels: Tensor, *, causal: bool
) -> Tensor:
    """Targets for all places of a batch, from the parents' logits there.

    Probabilities, or the value itself for a regression. `labels` has a row for each text; without
    labels of that form the parents count the same.
    """
    if logits[0].shape[-1] == 1:
        return torch.stack(list(logits)).mean(0)
    answers = torch.stack([each.softmax(-1) for each in logits])
    if target not in BY_TEXT:
        return answers.mean(0)
    known = torch.stack([log_likelihoods(each, labels, causal=causal) for each in logits])
    weights = (_so_far(known) if target == "bayes" and causal else _whole_rows(known)).softmax(0)
    places = weights.flatten(1) if causal else weights.flatten(1)[:, _counted(labels)]
    weights = F.pad(places, (0, answers.shape[1] - places.shape[1]))
    return (weights[..., None] * answers).sum(0)


def log_likelihoods(logits: Tensor, labels: Tensor, *, causal: bool) -> Tensor:
    """Log-probability of the label at each place of [rows, length]; 0 where there is none.

    Causal models predict the next token. `logits` are those of all places, or of those with labels.
    """
    if causal:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        each = F.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=IGNORED)
        return -each.view_as(labels)
    counted = _counted(labels)
    each = F.cross_entropy(logits[: len(counted)], labels.flatten()[counted], reduction="none")
    result = torch.zeros(labels.numel(), device=logits.device)
    return result.index_copy(0, counted, -each).view_as(labels)


def _counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED).flatten().nonzero().squeeze(-1)


def _so_far(known: Tensor) -> Tensor:
    """At each place, the log-likelihood of the tokens it has seen."""
    return known.cumsum(-1) - known


def _whole_rows(known: Tensor) -> Tensor:
    return known.sum(-1, keepdim=True).expand_as(known)


def row_likelihoods(known: Sequence[Tensor], labels: Tensor, *, causal: bool) -> Tensor:
    """Log-likelihood per token of each row, [parents, rows]; `known` are those of each parent."""
    shown = labels[:, 1:] if causal else labels
    tokens = (shown != IGNORED).sum(-1).clamp(min=1)
    return torch.stack(list(known)).sum(-1) / tokens


def disagreement(rows: Tensor) -> float:
    """How much it varies from row to row which parent knows it better, in nats per token.

    The largest standard deviation of a difference of two parents; `rows` are their likelihoods.
    """
    apart = [(a - b).std(correction=0) for a, b in combinations(rows, 2)]
    return float(torch.stack(apart).max()) if apart else 0.0
