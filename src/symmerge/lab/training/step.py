"""A model and its training step, on a CPU in float32 or on a GPU in bfloat16 with float32 masters, compiled and captured as a graph.

All that a step reads and writes stays in its place on the device: that is what a captured graph asks for.
"""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from symmerge.lab.training.datasets import Dataset, steps_per_epoch
from symmerge.lab.training.recipe import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPILE_LIMIT = 240  # seconds until the first steps must be done
WARM_STEPS, MOST_STEPS_PER_GRAPH, STEPS_AT_ONCE = 3, 16, 128


def batch_loss(
    net: nn.Module, lessons: Dataset, order: Tensor, noise: Tensor, at: Tensor
) -> Tensor:
    """Fetching, augmentation and forward pass in one function, for the compiler to fuse. `at`: the step's number, on the device."""
    inputs, targets = lessons.batch(order[at].squeeze(0), noise)
    # A CPU gets no bfloat16: some die of its products.
    with torch.autocast(at.device.type, torch.bfloat16) if at.is_cuda else nullcontext():
        logits = net(**inputs).logits
    return functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def working_copy(model: nn.Module) -> nn.Module:
    """The model with bfloat16 matrices, everything else shared: autocast then casts no weights, 70 small kernels a step. The numbers stay the same."""
    from transformers.pytorch_utils import Conv1D

    looked_up = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }  # in float32, also as a tied head
    matrices = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | Conv1D) and id(module.weight) not in looked_up
    }
    own = {
        id(parameter) for name in matrices for parameter in model.get_submodule(name).parameters()
    }
    net = copy.deepcopy(
        model,
        {id(parameter): parameter for parameter in model.parameters() if id(parameter) not in own},
    )
    for name in matrices:
        net.get_submodule(name).bfloat16()
    return net


@torch.no_grad()
def copy_all(into: Sequence[Any], source: Sequence[Any]) -> None:
    """Many tensors in a kernel or two, also from one type to another."""
    if into:
        torch._foreach_copy_(list(into), list(source))  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def no_packed_sequences() -> Iterator[None]:
    """transformers looks for packed sequences in the positions: a wait for the device, which a graph forbids, and a full mask when compiled. There are none."""
    from transformers import masking_utils

    usual = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = usual


class Pupil:
    """A model in training. Make it, `prepare` it at a level, `restore` where it begins, then `advance`."""

    def __init__(
        self,
        model: PreTrainedModel,
        lessons: Dataset,
        order: Tensor,
        schedule: Schedule,
        device: torch.device,
    ) -> None:
        self.lessons, self.schedule, self.order, self.cuda = (
            lessons,
            schedule,
            order.to(device),
            device.type == "cuda",
        )
        self.model: Any = model.to(device)  # type: ignore[arg-type]
        self.net = working_copy(self.model) if self.cuda else self.model
        self.net.train()
        pairs = (
            list(zip(self.model.parameters(), self.net.parameters(), strict=True))
            if self.cuda
            else []
        )
        self.copied = [(master, half) for master, half in pairs if master is not half]
        self.taught = [(master, half) for master, half in self.copied if master.requires_grad]
        for master, _ in self.taught:
            master.grad = torch.zeros_like(master)
        epoch = steps_per_epoch(lessons, schedule.batch_size)
        self.rates = [schedule.lr_at(step, epoch) for step in range(schedule.steps)]
        self.device_rates = torch.tensor(self.rates, device=device)
        self.parameters = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        self.optimiser = self._optimiser(device)
        self.at, self.losses = (
            torch.zeros(1, dtype=torch.long, device=device),
            torch.zeros(schedule.steps, device=device),
        )
        self.loss: Any = batch_loss
        self.unit, self.segment, self._steps = 1, 1, self.step

    def _optimiser(self, device: torch.device) -> torch.optim.AdamW:
        """Matrices decay; gains and biases only where the recipe says so."""
        schedule = self.schedule
        matrices = [
            parameter for parameter in self.parameters if parameter.ndim > 1 or schedule.all_decay
        ]
        vectors = [
            parameter
            for parameter in self.parameters
            if parameter.ndim < 2 and not schedule.all_decay
        ]
        groups = [
            {"params": matrices, "weight_decay": schedule.decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        if not self.cuda:
            return torch.optim.AdamW(groups, lr=schedule.lr, betas=schedule.betas)
        lr = torch.tensor(schedule.lr, device=device)
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=schedule.betas,
            fused=True,
            capturable=True,
        )

    def step(self) -> None:
        """One batch."""
        for parameter in self.net.parameters():
            parameter.grad = None
        for group in self.optimiser.param_groups:
            if self.cuda:
                group["lr"].copy_(self.device_rates[self.at].squeeze(0))
            else:
                group["lr"] = self.rates[int(self.at)]
        noise = torch.rand(self.schedule.batch_size, self.lessons.noise, device=self.at.device)
        loss = self.loss(self.net, self.lessons, self.order, noise, self.at)
        loss.backward()
        copy_all([master.grad for master, _ in self.taught], [half.grad for _, half in self.taught])
        if self.schedule.clip:
            clip_grad_norm_(self.parameters, self.schedule.clip)
        self.optimiser.step()
        copy_all([half for _, half in self.taught], [master for master, _ in self.taught])
        self.losses.index_copy_(0, self.at, loss.detach().view(1))
        self.at.add_(1)

    def prepare(self, level: str, begin: int) -> None:
        """On a GPU: compile, let the optimiser make its state, and capture several steps as one graph; what these steps do is undone by `restore`."""
        if not self.cuda:
            return
        signal.alarm(COMPILE_LIMIT)  # ends this process, and the next level takes over
        self.loss = torch.compile(batch_loss, dynamic=False) if "compile" in level else batch_loss
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_STEPS):
                self.step()
        torch.cuda.synchronize()
        look = self.schedule.evaluate_every
        if "graph" in level:
            whole = math.gcd(
                self.schedule.steps, look, begin
            )  # looks and the end fall between two graphs
            self.unit = max(
                size for size in range(1, MOST_STEPS_PER_GRAPH + 1) if whole % size == 0
            )
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):  # the same stream: gradients remember theirs
                for _ in range(self.unit):
                    self.step()
            self._steps = graph.replay
        self.segment = look or self.unit * (STEPS_AT_ONCE // self.unit)
        torch.cuda.synchronize()
        signal.alarm(0)

    def advance(self) -> int:
        """Train up to the next place where one may stop: the number of steps done."""
        done = int(self.at)
        end = min(self.schedule.steps, (done // self.segment + 1) * self.segment)
        for _ in range(done, end, self.unit):
            self._steps()
        assert int(self.at) == end, f"step {int(self.at)}, expected {end}"
        return end

    def state(self) -> dict[str, Any]:
        """All that the next steps depend on."""
        moments = [dict(self.optimiser.state[parameter]) for parameter in self.parameters]
        random = {
            "cpu": torch.get_rng_state(),
            **({"cuda": torch.cuda.get_rng_state()} if self.cuda else {}),
        }
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return {
            "at": int(self.at),
            "weights": weights,
            "moments": moments,
            "losses": self.losses.clone(),
            "random": random,
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Begin where a state says, in place. An empty one for a parameter is a fresh optimiser."""
        self.model.load_state_dict(state["weights"])
        copy_all([half for _, half in self.copied], [master for master, _ in self.copied])
        for parameter, saved in zip(self.parameters, state["moments"], strict=True):
            mine = self.optimiser.state[parameter]
            for name in mine:
                mine[name].copy_(saved[name]) if saved else mine[name].zero_()
            if not mine:
                mine.update({name: tensor.clone() for name, tensor in saved.items()})
        self.losses.copy_(state["losses"])
        self.at.fill_(state["at"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.cuda and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"])

    @torch.no_grad()
    def judge(self, lessons: Dataset) -> dict[str, float]:
        """Loss and accuracy in float32."""
        self.model.eval()
        losses, right = [], []
        for rows in lessons.rows().split(4 * self.schedule.batch_size):
            inputs, targets = lessons.batch(rows.to(self.at.device), None)
            logits, targets = self.model(**inputs).logits.flatten(0, -2), targets.flatten()
            losses.append(functional.cross_entropy(logits, targets, reduction="none")[targets >= 0])
            right.append((logits.argmax(-1) == targets)[targets >= 0])
        self.net.train()
        return {
            "loss": torch.cat(losses).mean().item(),
            "accuracy": torch.cat(right).float().mean().item(),
        }
