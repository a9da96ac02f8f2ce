"""Learned shares: how much each part of two aligned models counts, by gradient.

A part is a space of a layer (`ff.3`, `vo.0`), or `residual`. Shares may leave the line between the
models: a part of one may count more than whole, the other's then counts against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from symmerge.matching.learning.data import LearningData, load_data
from symmerge.matching.learning.distillation import distillation_loss
from symmerge.matching.optimization.loop import (
    Evaluation,
    History,
    Hooks,
    Loop,
    evenly,
    require_finite,
)
from symmerge.merging.healing import HealOptions, trainable
from symmerge.models.interpolation import piece_name
from symmerge.models.label_sets import with_all_labels
from symmerge.models.model import Model
from symmerge.models.progress import Phase, ProgressLike, reporter
from symmerge.models.tables import check_same_table
from symmerge.symmetry.notation import Piece
from symmerge.verification.modules import full_module

STEPS, LR = 110, 0.02


@dataclass(frozen=True)
class LearnedShares:
    """The share of B in each part, and the loss against the parents' answers before and after."""

    at: dict[str, float]
    before: float
    after: float
    history: History


def learn_shares(
    a: Model,
    b: Model,
    *,
    t: float = 0.5,
    options: HealOptions | None = None,
    progress: ProgressLike = None,
) -> LearnedShares:
    """Learn the shares of two models in one basin: `average(a, b, at=learn_shares(a, b).at)`.

    All begin at `t`. Ctrl-C gives the best so far.
    """
    check_same_table([a, b])
    how = options or HealOptions(steps=STEPS, lr=LR)
    how.check(a, 2)
    tell = reporter(progress)
    tell(Phase("learning the share of each part"))
    data = load_data(how.with_amounts(a), [a, b], tell)
    a, b = with_all_labels([a, b])
    learner = ShareLearner(a, b, t, how, data)
    history = Loop(learner, evenly(how.steps, patience=6), Hooks(report=tell)).run_to_best()
    at = dict(zip(learner.names, learner.best.tolist(), strict=True))
    return LearnedShares(at, next(iter(history.losses), float("nan")), history.best_loss, history)


@final
class ShareLearner:
    """One share per part, as the optimisation loop drives them."""

    def __init__(
        self, a: Model, b: Model, t: float, options: HealOptions, data: LearningData
    ) -> None:
        self.spec, self.options, self.data, device = a.spec, options, data, data.train.device
        self.module = full_module(a, torch.float32).to(device)
        self.parameters = trainable(self.module, a)
        self.pieces = {name: a.spec.pieces[name] for name in self.parameters}
        self.ends = [
            {name: model.weights[name].to(device, torch.float32) for name in self.parameters}
            for model in (a, b)
        ]
        self.names = sorted({self._name(p) for pieces in self.pieces.values() for p in pieces})
        self.shares = nn.Parameter(torch.full((len(self.names),), float(t), device=device))
        self.best = self.shares.detach().clone()
        self.optimizer = torch.optim.Adam([self.shares], lr=options.lr or LR, betas=(0.9, 0.99))

    def _name(self, piece: Piece) -> str:
        return piece_name(self.spec, piece)

    @torch.no_grad()
    def _place(self) -> None:
        """Write the mean with the current shares into the module."""
        for name, piece, share in self._parts():
            x, y = (piece.view(end[name]) for end in self.ends)
            piece.view(self.parameters[name].data).copy_(torch.lerp(x, y, share))

    def _parts(self) -> list[tuple[str, Piece, Tensor]]:
        share = dict(zip(self.names, self.shares.detach(), strict=True))
        return [
            (name, piece, share[self._name(piece)])
            for name, pieces in self.pieces.items()
            for piece in pieces
        ]

    def advance(self, step: int) -> int:
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + step)
        number = int(torch.randint(len(self.data.train), (), generator=generator))
        self._place()
        with torch.enable_grad():
            loss = distillation_loss(self.module, self.data.train[number])
            loss.backward()
        require_finite(float(loss.detach()), "loss", step + 1)
        slopes = dict.fromkeys(self.names, 0.0)
        for name, piece, _ in self._parts():
            gradient = self.parameters[name].grad
            if gradient is not None:
                x, y = (piece.view(end[name]) for end in self.ends)
                slopes[self._name(piece)] += float((piece.view(gradient) * (y - x)).sum())
        for parameter in self.parameters.values():
            parameter.grad = None
        self.shares.grad = torch.tensor([slopes[name] for name in self.names]).to(self.shares)
        self.optimizer.step()
        return step + 1

    @torch.no_grad()
    def evaluate(self, step: int) -> Evaluation:
        self._place()
        batches = self.data.evaluation_batches()
        losses = [float(distillation_loss(self.module, batch)) for batch in batches]
        return Evaluation(require_finite(sum(losses) / len(losses), "held-out loss", step))

    def keep_best(self) -> None:
        self.best = self.shares.detach().clone()

    def state(self, history: History) -> None:
        """Takes a minute, and is not resumed."""

    def restore(self, state: None) -> History:
        return History()
