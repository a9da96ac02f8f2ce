"""`SoftLearner`: soft matching, as the optimisation loop drives it.

B is first moved exactly, by the alignment of the start. Mixing matrices act on the result: their
logarithms (`latent`) are learned by gradient, and begin near the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from symmerge.checkpoints.weights import MemoryWeights
from symmerge.errors import SymmergeError
from symmerge.matching.learning.data import LearningData
from symmerge.matching.learning.distillation import DistillationBatch, distillation_loss
from symmerge.matching.learning.samplers import Sampler
from symmerge.matching.learning.soft_permutations import (
    MATRIX,
    first_latent,
    one_hot,
    sinkhorn,
    soft_table,
)
from symmerge.matching.optimization.loop import CLIP_NORM, Evaluation, History, require_finite
from symmerge.matching.optimization.schedules import LearningRate
from symmerge.matching.resume import ResumeEntry
from symmerge.models.alignment import Alignment, apply
from symmerge.models.model import Model
from symmerge.symmetry.groups.indices import assign
from symmerge.verification.modules import full_module

if TYPE_CHECKING:
    from symmerge.matching.soft import SoftMatching

LATENT = "latent"  # component name in resume files
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam
Matrices = Mapping[str, Tensor]


class _Loss(nn.Module):
    """The loss as a module for `functional_call`, so that gradients flow through the weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: DistillationBatch) -> Tensor:
        return distillation_loss(self.module, batch)


@final
class SoftLearner:
    """The current `latent` matrices, and the `best` by the midpoint's loss."""

    def __init__(
        self, options: SoftMatching, a: Model, b: Model, start: Alignment, data: LearningData
    ) -> None:
        self.options, self.start, self.data = options, start, data
        self.device, spaces = data.train.device, options.chosen_spaces(a.spec)
        self.table, self.sampler = soft_table(a.spec, spaces), Sampler(options.sampler)
        self.a, self.b = (
            {name: model.weights[name].to(self.device, torch.float32) for name in a.spec.tensors}
            for model in (a, apply(start, b))
        )
        self.mixed = {met.piece.tensor for name in spaces for met in self.table.occurrences(name)}
        module = full_module(replace(a, weights=MemoryWeights(self.a)), torch.float32)
        self._loss = _Loss(module.to(self.device))
        self.latent = self._first_latents(spaces)
        self.best = self._copies()
        self.rate = LearningRate(
            lr=options.lr, steps=options.steps, warmup=options.steps // 10, overlap=True
        )
        self.optimizer = torch.optim.Adam(self.latent.values(), lr=options.lr, betas=(0.9, 0.99))

    def _first_latents(self, spaces: list[str]) -> dict[str, nn.Parameter]:
        generator = torch.Generator().manual_seed(self.options.seed)
        sizes, noise = self.table.sizes, self.options.noise
        latents = {
            name: first_latent(sizes[name], self.table.batch(name), noise, generator)
            for name in spaces
        }
        return {
            name: nn.Parameter(latent.to(self.device, torch.float32))
            for name, latent in latents.items()
        }

    def _copies(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.latent.items()}

    # the loss

    def _weights(self, matrices: Matrices, t: float) -> dict[str, Tensor]:
        """The model at `t` between A and the mixed B, by the names of the loss's parameters."""
        soft = Alignment(self.table, {name: {MATRIX: matrix} for name, matrix in matrices.items()})
        weights = {}
        for name, tensor in self.b.items():
            moved = soft.transport(name, tensor) if name in self.mixed else tensor
            weights[name] = torch.lerp(self.a[name], moved, t)
        weights |= {alias: weights[target] for alias, target in self.table.aliases.items()}
        return {f"module.{name}": tensor for name, tensor in weights.items()}

    def _batch_loss(self, weights: Mapping[str, Tensor], batch: DistillationBatch) -> Tensor:
        return functional_call(self._loss, dict(weights), (batch,))

    @torch.no_grad()
    def held_out_loss(self, matrices: Matrices, t: float) -> float:
        weights, batches = self._weights(matrices, t), self.data.evaluation_batches()
        return sum(float(self._batch_loss(weights, batch)) for batch in batches) / len(batches)

    # the run

    def advance(self, step: int) -> int:
        step += 1
        # One generator per step, so that a resumed run draws what it would have drawn.
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + step)
        number = int(torch.randint(len(self.data.train), (), generator=generator))
        batch, t = self.data.train[number], self.sampler.draw(generator)
        self.optimizer.param_groups[0]["lr"] = self.rate.at(step - 1)
        self.optimizer.zero_grad()
        try:
            loss = self._batch_loss(self._weights(self._checkpointed(), t), batch)
            loss.backward()
        except torch.cuda.OutOfMemoryError as error:
            remedy = "lower --batch-size, or learn fewer --spaces"
            raise SymmergeError(f"the GPU's memory is full at step {step}: {remedy}") from error
        require_finite(float(loss.detach()), "loss", step)
        nn.utils.clip_grad_norm_(self.latent.values(), CLIP_NORM)
        self.optimizer.step()
        return step

    def _checkpointed(self) -> Matrices:
        """Recompute in the backward pass: storing every normalisation would exceed the memory."""
        again = partial(
            checkpoint,
            sinkhorn,
            times=self.options.sinkhorn,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return {name: again(latent) for name, latent in self.latent.items()}

    @torch.no_grad()
    def evaluate(self, step: int) -> Evaluation:
        times = self.options.sinkhorn
        matrices = {name: sinkhorn(latent, times) for name, latent in self.latent.items()}
        loss = self.held_out_loss(matrices, 0.5)
        return Evaluation(require_finite(loss, "held-out loss", step), " at the midpoint")

    def keep_best(self) -> None:
        self.best = self._copies()

    # the result

    def relaxed(self) -> Alignment:
        """The best matrices, in float64. They act on B where the start has put it."""
        times = self.options.sinkhorn
        matrices = {
            name: sinkhorn(latent.double().cpu(), times) for name, latent in self.best.items()
        }
        return Alignment(self.table, {name: {MATRIX: matrix} for name, matrix in matrices.items()})

    def record(self, relaxed: Alignment, history: History) -> dict[str, Any]:
        """Distance from permutations, and its effect on the losses at the midpoint and at B."""
        soft = {name: element[MATRIX] for name, element in relaxed.elements.items()}
        hard = {name: assign(matrix) for name, matrix in soft.items()}
        identity = {
            name: torch.arange(index.shape[-1]).expand_as(index) for name, index in hard.items()
        }
        start = {name: one_hot(index) for name, index in identity.items()}
        hardened = {name: one_hot(index) for name, index in hard.items()}
        flips = sum(int((index != identity[name]).sum()) for name, index in hard.items())
        softness = [float((1 - matrix.amax(-1)).mean()) for matrix in soft.values()]
        rows_off_one = [float((matrix.sum(-1) - 1).abs().max()) for matrix in soft.values()]
        ways = {"start": start, "soft": soft, "hardened": hardened}
        return {
            "spaces": len(soft),
            "softness": sum(softness) / len(softness),
            "flipped": flips / sum(index.numel() for index in hard.values()),
            "rows_off_one": max(rows_off_one),
            "midpoint": {way: self.held_out_loss(ways[way], 0.5) for way in ways},
            "end": {"loss": self.held_out_loss(soft, 1.0) - self.held_out_loss(start, 1.0)},
            "steps": history.step,
            "stopped": history.stopped,
        }

    # resuming

    def state(self, history: History) -> ResumeEntry:
        latents = {"current": self._copies(), "best": self.best}
        for moment in MOMENTS if self.optimizer.state else ():
            latents[moment] = {
                name: self.optimizer.state[value][moment] for name, value in self.latent.items()
            }
        elements = {
            which: {name: {LATENT: value.cpu()} for name, value in values.items()}
            for which, values in latents.items()
        }
        record = {"soft": {"history": history.to_json()}}
        return ResumeEntry(record, {"start": self.start.elements, **elements})

    @torch.no_grad()
    def restore(self, state: ResumeEntry) -> History:
        history = History(**state.record["soft"]["history"])
        latents = {
            which: {name: element[LATENT].to(self.device) for name, element in elements.items()}
            for which, elements in state.elements.items()
            if which != "start"
        }
        self.best = latents["best"]
        for name, value in self.latent.items():
            value.copy_(latents["current"][name])
            if MOMENTS[0] in latents:
                moments = {moment: latents[moment][name] for moment in MOMENTS}
                step = torch.tensor(float(history.step))
                self.optimizer.state[value] = {"step": step, **moments}
        return history
