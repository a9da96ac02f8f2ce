"""Healing: distil the parents into all weights of their merge, after merging.

An alignment moves no weight off its orbit, so the midpoint keeps some error. A few hundred steps
on text that the parents sample take most of it away, without any data. The result is a model of
its own: reported apart from the merge it began as.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from symmerge.checkpoints.memory import free_memory, freed_memory_kept
from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import MismatchError, SymmergeError
from symmerge.evaluation.tasks.catalog import task_of
from symmerge.matching.efforts import Amount, amount_of
from symmerge.matching.learning.data import LearningData, check_data, load_data
from symmerge.matching.learning.distillation import DistillationBatch, distillation_loss
from symmerge.matching.learning.options import DataOptions
from symmerge.matching.optimization.buffers import StepLosses, copy_all
from symmerge.matching.optimization.graphs import StepGraphs
from symmerge.matching.optimization.loop import (
    CLIP_NORM,
    Diverged,
    Evaluation,
    History,
    Hooks,
    Loop,
    LoopPlan,
    NotFinite,
    evenly,
    require_finite,
)
from symmerge.matching.optimization.precision import tf32_matmuls
from symmerge.matching.optimization.schedules import LearningRate
from symmerge.models.model import Model, device_of
from symmerge.models.progress import Notice, Phase, ProgressLike, reporter
from symmerge.verification.modules import empty_module, full_module

RATE_TIMES_WIDTH, HIGHEST_RATE = 1e-3 * 256, 3e-3  # wider models take smaller steps
RATE_OF_IMAGES, SYNTHETIC = 3e-4, 1e-4  # 1e-3 made three pairs of ViTs worse (docs/log.md)
INPUTS_PER_STEP, MOST_INPUTS = 4, 4  # new inputs per step; times what an alignment generates
DIVERGED = 1.0  # nats above where it began
COPIES = 6  # in float32: weights, gradients, two moments, the best so far, activations
OTHER_SEED = 500  # text to heal by is not the text that was learned from


@dataclass(frozen=True, kw_only=True)
class HealOptions(DataOptions):
    """How to heal: `HealOptions(steps=300)`. No data: self-generated inputs, as many as needed."""

    lr: float | None = None  # by width

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("lr")

    def check(self, model: Model, parents: int = 2) -> None:
        """Refuse what cannot be healed, before any work."""
        if not model.stock:
            raise MismatchError("only a stock checkpoint can be healed: leave out --heal")
        check_data(self, model)
        needed = 4 * model.parameters * (COPIES + parents)
        free = free_memory(device_of(self.device))
        if needed > free:
            raise MismatchError(
                f"healing needs about {needed / 1e9:.0f} GB of memory on {self.device}, but only"
                f" {free / 1e9:.0f} GB are free: leave out --heal, or choose a --device with more"
            )

    def with_amounts(self, model: Model) -> HealOptions:
        """The same with the learning rate and the number of inputs filled in."""
        kind, width = task_of(model), model.spec.sizes[model.spec.stream]
        amount = amount_of("standard", model, kind, self.device)
        size = self.batch_size or (None if self.data else amount.batch_size)
        highest = HIGHEST_RATE
        if kind == "image":
            highest = RATE_OF_IMAGES if self.data else SYNTHETIC
        rate = self.lr or min(highest, RATE_TIMES_WIDTH / width)
        filled = replace(self, lr=rate, batch_size=size)
        if self.data is not None:
            return filled
        length = self.generated_length or amount.generated_length
        generated = self.generated or self._inputs(amount)
        return replace(filled, generated=generated, generated_length=length)

    def _inputs(self, amount: Amount) -> int:
        most = MOST_INPUTS * amount.generated
        return max(2 * amount.batch_size, min(INPUTS_PER_STEP * self.steps, most))


@dataclass(frozen=True)
class Healed:
    """A healed merge, and its loss against its parents' answers on held-out inputs."""

    model: Model
    before: float
    after: float
    history: History

    def record(self) -> dict[str, object]:
        return {"before": self.before, "after": self.after, "stopped": self.history.stopped}


@freed_memory_kept()
def heal(
    merged: Model,
    parents: Sequence[Model],
    *,
    options: HealOptions | int,
    progress: ProgressLike = None,
    **more: Any,
) -> Healed:
    """Distil the parents into a merge: `heal(merged, [a, b], options=300).model`.

    Only the merge is learned. The parents may be as they were before alignment: their function is
    the same. Ctrl-C, or a loss that is not finite, gives the best state so far. `more` are fields
    of `HealOptions`, beside a number of steps.
    """
    how = HealOptions(steps=options, **more) if isinstance(options, int) else options
    how.check(merged, len(parents))
    tell, how = reporter(progress), how.with_amounts(merged)
    tell(Phase("healing"))
    try:
        data = load_data(how, list(parents), tell)
    except KeyboardInterrupt:  # while inputs are generated
        tell(Notice("interrupted: not healed"))
        ended = History(stopped="interrupted", interrupted=True)
        return Healed(merged, math.nan, math.nan, ended)
    healer = Healer(merged, how, data)
    history = Loop(healer, healer.plan, Hooks(report=tell, remedy="lower --heal-lr")).run_to_best()
    tell(Notice(_ended(history)))
    return _healed(merged, healer, history)


def _ended(history: History) -> str:
    if not history.best_step:
        return f"not healed ({history.stopped}): the model is as it was"
    return f"healed by {history.best_step} steps ({history.stopped})"


def _healed(merged: Model, healer: Healer, history: History) -> Healed:
    before, after = next(iter(history.losses), math.nan), history.best_loss
    result = Healed(merged, before, after, history)
    if not history.best_step:
        return result
    how = healer.options
    what = (
        f"all weights distilled from the parents (target {healer.data.train.target}) for"
        f" {history.best_step} steps of {history.step} on"
        f" {how.data.data if how.data else 'self-generated inputs'}; held-out loss against their"
        f" answers {before:.4f} before, {after:.4f} after"
    )
    details = {
        "steps": history.step,
        "lr": how.lr,
        "target": healer.data.train.target,
        "data": how.data.data if how.data else "self",
        "seed": how.seed,
        "threads": torch.get_num_threads(),
        **result.record(),
    }
    step = HistoryStep("heal", what, details=details)
    model = merged.derive(MemoryWeights(healer.weights(merged)), step=step)
    return Healed(model, before, after, history)


@final
class Healer:
    """A merge whose weights are all learned, as the optimisation loop drives it.

    `learned`: a module and those of its parameters that learn, instead of all weights.
    """

    def __init__(
        self,
        merged: Model,
        options: HealOptions,
        data: LearningData,
        learned: tuple[nn.Module, dict[str, nn.Parameter]] | None = None,
    ) -> None:
        assert options.lr is not None
        self.options, self.data, self.device = options, data, data.train.device
        if learned is None:
            self.module = full_module(merged, torch.float32).to(self.device)
            self.parameters = trainable(self.module, merged)
        else:  # moving a module keeps its parameters
            self.module, self.parameters = learned[0].to(self.device), learned[1]
        self.best = {name: value.detach().clone() for name, value in self.parameters.items()}
        steps = options.steps
        self.rate = LearningRate(lr=options.lr, steps=steps, warmup=steps // 10, overlap=True)
        self.losses = StepLosses(steps, self.device)
        self._first: float | None = None  # held-out loss
        captured = self.device.type == "cuda"  # a captured graph needs the rate as a tensor
        self.optimizer = torch.optim.Adam(
            self.parameters.values(),
            lr=torch.tensor(options.lr, device=self.device) if captured else options.lr,
            betas=(0.9, 0.99),
            capturable=captured,
            fused=True,
        )
        self._graphs = StepGraphs(self._descend) if captured else None

    @property
    def plan(self) -> LoopPlan:
        """Without patience: it gets worse before the learning rate falls, and then better."""
        return evenly(self.options.steps)

    def advance(self, step: int) -> int:
        step += 1
        self._set_lr(self.rate.at(step - 1))
        batches = (self.data.train[self._batch_number(step)],)
        try:
            (self._graphs or self._descend)(batches)
        except torch.cuda.OutOfMemoryError as error:
            raise SymmergeError(
                f"the GPU's memory is full at step {step}: heal on another device, or leave out"
                " --heal"
            ) from error
        return step

    def _batch_number(self, step: int) -> int:
        """Every batch once per pass, in an order of its own."""
        passes, at = divmod(step - 1, len(self.data.train))
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + passes)
        return int(torch.randperm(len(self.data.train), generator=generator)[at])

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _descend(self, batches: tuple[DistillationBatch, ...]) -> None:
        """One step; the part that can be captured as a CUDA graph."""
        with tf32_matmuls(self.device), torch.enable_grad():
            (batch,) = batches
            loss = distillation_loss(self.module, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters.values(), CLIP_NORM)
            self.optimizer.step()
        self.losses.add(loss)
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def evaluate(self, step: int) -> Evaluation:
        if (wrong := self.losses.first_not_finite()) is not None:
            raise NotFinite(f"the loss was not finite at step {wrong}")
        batches = self.data.evaluation_batches()
        losses = [float(distillation_loss(self.module, batch)) for batch in batches]
        loss = require_finite(sum(losses) / len(losses), "held-out loss", step)
        self._first = loss if self._first is None else self._first
        if loss > self._first + DIVERGED:
            raise Diverged(f"the held-out loss rose from {self._first:.3g} to {loss:.3g}")
        return Evaluation(loss)

    def keep_best(self) -> None:
        copy_all(list(self.best.values()), list(self.parameters.values()))

    def state(self, history: History) -> None:
        """A heal takes minutes, and is not resumed."""

    def restore(self, state: None) -> History:
        return History()

    def weights(self, merged: Model) -> dict[str, Tensor]:
        """The best weights, in the precision of the merge; what is not learned stays as it was."""
        old = merged.weights
        return {
            name: self.best[name].to("cpu", old.dtype(name)) if name in self.best else old[name]
            for name in old
        }


def trainable(module: nn.Module, model: Model) -> dict[str, nn.Parameter]:
    """Parameters of its own for a module, by the names of the table; tied ones become one.

    A module may share its memory with the model it was made of, which must stay as it is. Stored
    tables that the stock class does not train, as sinusoids, stay as they are.
    """
    stock = dict(empty_module(model, torch.float32).named_parameters(remove_duplicate=False))
    own: dict[str, nn.Parameter] = {}
    for prefix, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter is None or not stock[name].requires_grad:
                continue
            name = model.spec.aliases.get(name, name)
            if name in model.spec.tensors:
                if name not in own:
                    own[name] = nn.Parameter(parameter.detach().clone())
                owner._parameters[key] = own[name]
    return own
