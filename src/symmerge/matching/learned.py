"""Learned matching: move the elements themselves, by gradient, so that the models between A and B get better.

Only group elements are trained: both ends stay exactly the parents, and every merge is a stock checkpoint. The transport is the table's own
(`Alignment.transport`), differentiated; the target is what the parents predict together, so no label is needed. Permutations stay as the start
found them; rotations, bases inside heads, rotary pairs and scales move along their groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from symmerge.alignment import Alignment
from symmerge.calibration import questions
from symmerge.errors import MismatchError
from symmerge.groups import Element
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.base import Solution
from symmerge.matching.journal import Journal
from symmerge.matching.search import Matching, Report
from symmerge.matching.weights import WeightMatching
from symmerge.model import Model
from symmerge.probe import Inputs, mask_token, own_text, predictions, together
from symmerge.tasks.base import IGNORED, Task, split
from symmerge.verify import full_module

Question = tuple[Inputs, Tensor | None]


@final
@dataclass(frozen=True)
class LearnedMatching:
    """Options of learned matching: `LearnedMatching(data=make_task("image", "digits", [a, b]))`.

    `data` is a task whose inputs are learned on (its labels are not used); None lets language models write their own text. `start` finds where learning
    starts. `low` and `high` bound the share of B in the models that are trained. `spaces` may name those that move (residual, qk, vo, ff).
    """

    data: Task | None = field(default=None, repr=False)
    start: Matching | None = None
    steps: int = 100
    rate: float = 3e-3
    low: float = 0.4
    high: float = 0.6
    spaces: tuple[str, ...] | None = None
    held_out: float = 0.1
    seed: int = 0
    device: str = "cpu"

    def record(self) -> dict[str, Any]:
        """The options, for solution.json."""
        start = self._start().record()
        plain = {name: value for name, value in asdict(replace(self, data=None, start=None)).items() if name not in ("data", "start")}
        return {**plain, "data": self.data.record() if self.data else "self", "start": start}

    def _start(self) -> Matching:
        if self.start is not None:
            return self.start
        return ActivationMatching(data=self.data, seed=self.seed, device=self.device) if self.data else WeightMatching(seed=self.seed, device=self.device)

    def solve(self, a: Model, b: Model, *, report: Report | None = None, journal: Journal | None = None) -> Solution:
        """Align `b` to `a`. Preconditions: both canonical, and of the same table. Ctrl-C returns the best so far."""
        report = report or (lambda line: None)
        began = time.perf_counter()
        found = self._start().solve(a, b, report=report, journal=journal)
        if found.interrupted:
            return found
        learner = _Learner(self, a, b, found.alignment)
        interrupted = False
        try:
            learner.run(report)
        except KeyboardInterrupt:
            interrupted = True
        return replace(
            found,
            alignment=learner.best,
            objective=tuple(learner.held_losses),
            by_space={},
            converged=not interrupted,
            seconds=time.perf_counter() - began,
            settings={**self.record(), "chosen": found.settings["chosen"], "scored_on": "held-out inputs"},
            interrupted=interrupted,
            distance=math.nan,
            correlations=None,
        )


class _Learner:
    """One run: the tangents, the optimiser, and the best elements so far by the loss on inputs that were held out."""

    def __init__(self, options: LearnedMatching, a: Model, b: Model, start: Alignment) -> None:
        self.options, self.table, self.device = options, a.spec, options.device
        self.generator = torch.Generator().manual_seed(options.seed)
        self.weights = [{name: model.weights[name].to(self.device, torch.float32) for name in a.spec.tensors} for model in (a, b)]
        self.modules = [full_module(model, torch.float32).to(self.device) for model in (a, b)]
        self.start = start
        self.origin = {name: {part: _single(value).to(self.device) for part, value in element.items()} for name, element in start.elements.items()}
        self.tangents = self._tangents()
        if not self.tangents:
            raise MismatchError("nothing can be learned: none of the spaces chosen moves continuously")
        self.training, self.held = self._inputs(a, b)
        self.best, self.held_losses = start, []

    def _tangents(self) -> dict[str, dict[str, nn.Parameter]]:
        chosen = self.options.spaces
        found = {}
        for name, space in self.table.hidden.items():
            if chosen is not None and name.partition(".")[0] not in chosen:
                continue
            shapes = {part: (*self.table.batch(name), *shape) for part, shape in space.group.tangent().items() if math.prod(shape)}
            if shapes:
                found[name] = {part: nn.Parameter(torch.zeros(shape, device=self.device)) for part, shape in shapes.items()}
        return found

    def _inputs(self, a: Model, b: Model) -> tuple[list[Question], list[Question]]:
        if self.options.data is not None:
            training, held = split(self.options.data, self.options.held_out)
            return [questions(batch, self.device) for batch in training.batches], [questions(batch, self.device) for batch in held.batches]
        tokens = torch.cat([own_text(model, module, rows=256, length=256, seed=self.options.seed) for model, module in zip((a, b), self.modules, strict=True)])
        tokens = tokens[torch.randperm(len(tokens), generator=self.generator)]
        blank = mask_token(a) if a.spec.task == "masked-lm" else None
        batches = [{"input_ids": part, "labels": part if blank is None else torch.where(part == blank, part, IGNORED)} for part in tokens.split(8)]
        cut = max(1, round(self.options.held_out * len(batches)))
        made = [questions(batch, self.device) for batch in batches]
        return made[cut:], made[:cut]

    def elements(self) -> dict[str, Element]:
        """Where the tangents have moved the start to."""
        groups = self.table.spaces
        return {name: groups[name].group.moved(element, self._along(name)) if name in self.tangents else element for name, element in self.origin.items()}

    def _along(self, name: str) -> dict[str, Tensor]:
        shapes = self.table.spaces[name].group.tangent()
        empty = {part: torch.zeros((*self.table.batch(name), *shape), device=self.device) for part, shape in shapes.items() if not math.prod(shape)}
        return {**self.tangents[name], **empty}

    def _loss(self, elements: Mapping[str, Element], inputs: Inputs, asked: Tensor | None, t: float) -> Tensor:
        """The cross-entropy of the model at t to what its parents predict together."""
        alignment = Alignment(self.table, elements)
        a, b = self.weights
        mixed = {name: torch.lerp(a[name], alignment.transport(name, b[name]), t) for name in a}
        mixed |= {alias: mixed[target] for alias, target in self.table.ties.items()}
        predicted = predictions(lambda **given: functional_call(self.modules[0], mixed, kwargs=given), inputs, asked)
        return -(together(self.modules, inputs, asked) * predicted.log_softmax(-1)).sum(-1).mean()

    @torch.no_grad()
    def _held_loss(self) -> float:
        elements = self.elements()
        return sum(float(self._loss(elements, *batch, 0.5)) for batch in self.held) / len(self.held)

    def run(self, report: Report) -> None:
        options = self.options
        moving = [value for parts in self.tangents.values() for value in parts.values()]
        optimiser = torch.optim.Adam(moving, lr=options.rate)
        warm = max(1, options.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / options.steps))))
        self._keep(report, 0)
        every = max(1, options.steps // 10)
        for step in range(1, options.steps + 1):
            batch = self.training[int(torch.randint(len(self.training), (1,), generator=self.generator))]
            t = options.low + (options.high - options.low) * float(torch.rand(1, generator=self.generator))
            self._loss(self.elements(), *batch, t).backward()
            nn.utils.clip_grad_norm_(moving, 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            if step % every == 0:
                self._keep(report, step)

    def _keep(self, report: Report, step: int) -> None:
        """The best so far, by the middle's loss on held-out inputs."""
        held = self._held_loss()
        report(f"step {step} of {self.options.steps}: the middle's loss to its parents on held-out inputs {held:.4f}")
        if not self.held_losses or held < min(self.held_losses):
            self.best = self._exact()
        self.held_losses.append(held)

    @torch.no_grad()
    def _exact(self) -> Alignment:
        """The elements in float64: a rotation learned in float32 would be one to 1e-6 only."""
        found = dict(self.start.elements)
        for name in self.tangents:
            along = {part: value.double().cpu() for part, value in self._along(name).items()}
            found[name] = self.table.spaces[name].group.moved(found[name], along)
        return Alignment(self.table, found)


def _single(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value
