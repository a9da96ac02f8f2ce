"""A model and its training step: float32 on a CPU, bfloat16 with float32 masters on a GPU.

All tensors of a step keep their addresses on the device, as CUDA graphs require.
"""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from symmerge.lab.training.datasets import Dataset, steps_per_epoch
from symmerge.lab.training.recipe import Schedule
from symmerge.matching.optimization.buffers import StepLosses, copy_all
from symmerge.matching.optimization.graphs import GraphRecorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPILE_LIMIT = 240  # seconds for compiling and the first steps
WARM_UP_STEPS = 3
MAX_STEPS_PER_GRAPH = 16
STEPS_PER_ADVANCE = 128  # on a GPU, where nothing is evaluated in between
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
WeightPair = tuple[nn.Parameter, nn.Parameter]  # float32 master, bfloat16 copy


def batch_loss(
    net: nn.Module, dataset: Dataset, order: Tensor, noise: Tensor, step: Tensor
) -> Tensor:
    """Fetch, augment, forward: one function for the compiler. `step` lives on the device."""
    inputs, targets = dataset.batch(order[step].squeeze(0), noise)
    # No bfloat16 on a CPU: its matmuls crash Python on some machines.
    with torch.autocast(step.device.type, torch.bfloat16) if step.is_cuda else nullcontext():
        logits = net(**inputs).logits
    return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def working_copy(model: nn.Module) -> nn.Module:
    """The model with bfloat16 matrices, everything else shared.

    Autocast then casts no weights, which saves 70 small kernels a step. The numbers are the same.
    """
    from transformers.pytorch_utils import Conv1D

    embeddings = {  # stay in float32, even as a tied head
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    names = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | Conv1D)
        and id(module.weight) not in embeddings
    }
    halved = {id(weight) for name in names for weight in model.get_submodule(name).parameters()}
    shared = {id(weight): weight for weight in model.parameters() if id(weight) not in halved}
    net = copy.deepcopy(model, shared)
    for name in names:
        net.get_submodule(name).bfloat16()
    return net


@contextmanager
def no_packed_sequences() -> Iterator[None]:
    """Tell transformers that no sequences are packed.

    Its own check synchronises with the device, which a graph forbids, and compiles to a full mask.
    """
    from transformers import masking_utils

    usual = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = usual


class TrainingStep:
    """A model in training: `prepare` it, `restore` a state, then `advance`."""

    def __init__(
        self,
        model: PreTrainedModel,
        dataset: Dataset,
        order: Tensor,
        schedule: Schedule,
        device: torch.device,
    ) -> None:
        self.dataset, self.schedule = dataset, schedule
        self.device, self.cuda, self.order = device, device.type == "cuda", order.to(device)
        self.model: Any = model.to(device)  # type: ignore[arg-type]
        self.net = working_copy(self.model) if self.cuda else self.model
        self.net.train()
        self.copied, self.trained = self._pairs()
        for master, _ in self.trained:
            master.grad = torch.zeros_like(master)
        rate = schedule.learning_rate(steps_per_epoch(dataset, schedule.batch_size))
        self.rates = [rate.at(step) for step in range(schedule.steps)]
        self.device_rates = torch.tensor(self.rates, device=device)
        self.parameters = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = self._optimizer()
        self.losses = StepLosses(schedule.steps, device)
        self.loss: Callable[..., Tensor] = batch_loss
        self.steps_per_graph, self.steps_per_advance, self._steps = 1, 1, self.step

    def _pairs(self) -> tuple[list[WeightPair], list[WeightPair]]:
        """Masters with their bfloat16 copies: all, and those that are trained."""
        weights = zip(self.model.parameters(), self.net.parameters(), strict=True)
        copied = [(master, half) for master, half in weights if master is not half]
        return copied, [pair for pair in copied if pair[0].requires_grad]

    def _optimizer(self) -> torch.optim.Adam:
        """Weight decay for matrices, for gains and biases only if the recipe says so."""
        schedule = self.schedule
        kind = OPTIMIZERS[schedule.optimizer]
        least = 0 if schedule.all_decay else 2
        groups = [
            {
                "params": [weight for weight in self.parameters if weight.ndim >= least],
                "weight_decay": schedule.decay,
            },
            {
                "params": [weight for weight in self.parameters if weight.ndim < least],
                "weight_decay": 0.0,
            },
        ]
        if not self.cuda:
            return kind(groups, lr=schedule.lr, betas=schedule.betas)
        return kind(
            [group for group in groups if group["params"]],
            lr=torch.tensor(schedule.lr, device=self.device),
            betas=schedule.betas,
            fused=True,
            capturable=True,
        )

    def step(self) -> None:
        """Train on one batch."""
        for parameter in self.net.parameters():
            parameter.grad = None
        self._set_lr()
        noise = torch.rand(self.schedule.batch_size, self.dataset.noise_size, device=self.device)
        loss = self.loss(self.net, self.dataset, self.order, noise, self.losses.step)
        loss.backward()
        copy_all(
            [master.grad for master, _ in self.trained], [half.grad for _, half in self.trained]
        )
        if self.schedule.clip:
            clip_grad_norm_(self.parameters, self.schedule.clip)
        self.optimizer.step()
        copy_all([half for _, half in self.trained], [master for master, _ in self.trained])
        self.losses.add(loss)

    def _set_lr(self) -> None:
        for group in self.optimizer.param_groups:
            if self.cuda:
                group["lr"].copy_(self.device_rates[self.losses.step].squeeze(0))
            else:
                group["lr"] = self.rates[int(self.losses.step)]

    def prepare(self, acceleration: str, begin: int) -> None:
        """On a GPU: compile, create the optimizer's state, capture several steps as a graph.

        `restore` undoes what these steps change.
        """
        if not self.cuda:
            return
        signal.alarm(COMPILE_LIMIT)  # kills this process: the next acceleration takes over
        if "compile" in acceleration:
            self.loss = torch.compile(batch_loss, dynamic=False)
        recorder = GraphRecorder()
        recorder.warm_up(lambda: self._take(WARM_UP_STEPS))
        torch.cuda.synchronize()
        if "graph" in acceleration:
            # Evaluations and the end must fall between two replays.
            span = math.gcd(self.schedule.steps, self.schedule.evaluate_every, begin)
            sizes = range(1, MAX_STEPS_PER_GRAPH + 1)
            self.steps_per_graph = max(size for size in sizes if span % size == 0)
            self._steps = recorder.capture(lambda: self._take(self.steps_per_graph)).replay
        graphs = STEPS_PER_ADVANCE // self.steps_per_graph
        self.steps_per_advance = self.schedule.evaluate_every or self.steps_per_graph * graphs
        torch.cuda.synchronize()
        signal.alarm(0)

    def _take(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def advance(self) -> int:
        """Train up to the next possible stop; returns the number of steps done."""
        done, span = int(self.losses.step), self.steps_per_advance
        end = min(self.schedule.steps, (done // span + 1) * span)
        for _ in range(done, end, self.steps_per_graph):
            self._steps()
        assert int(self.losses.step) == end, f"step {int(self.losses.step)}, expected {end}"
        return end

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def state(self) -> dict[str, object]:
        """Everything the next steps depend on."""
        random = {"cpu": torch.get_rng_state()}
        if self.cuda:
            random["cuda"] = torch.cuda.get_rng_state()
        return {
            "step": int(self.losses.step),
            "weights": self.weights(),
            "moments": [dict(self.optimizer.state[parameter]) for parameter in self.parameters],
            "losses": self.losses.values.clone(),
            "random": random,
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Load a state in place. Empty moments stand for a fresh optimizer."""
        self.model.load_state_dict(state["weights"])
        copy_all([half for _, half in self.copied], [master for master, _ in self.copied])
        for parameter, saved in zip(self.parameters, state["moments"], strict=True):
            moments = self.optimizer.state[parameter]
            for name in moments:
                moments[name].copy_(saved[name]) if saved else moments[name].zero_()
            if not moments:
                moments.update({name: tensor.clone() for name, tensor in saved.items()})
        self.losses.values.copy_(state["losses"])
        self.losses.step.fill_(state["step"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.cuda and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"])

    @torch.no_grad()
    def evaluate(self, dataset: Dataset) -> dict[str, float]:
        """Loss and accuracy in float32."""
        self.model.eval()
        losses, hits = [], []
        for rows in dataset.rows().split(4 * self.schedule.batch_size):
            inputs, targets = dataset.batch(rows.to(self.device), None)
            logits, targets = self.model(**inputs).logits.flatten(0, -2), targets.flatten()
            counts = targets >= 0
            losses.append(functional.cross_entropy(logits, targets, reduction="none")[counts])
            hits.append((logits.argmax(-1) == targets)[counts])
        self.net.train()
        return {
            "loss": torch.cat(losses).mean().item(),
            "accuracy": torch.cat(hits).float().mean().item(),
        }
