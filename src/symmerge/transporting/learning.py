"""An alignment made for carrying: what must correspond is the effect of a change.

TUNED writes text, and OTHER with the carried change should answer it as TUNED does. Learned are
only the symmetry by which the change moves, and one scale per tensor: OTHER itself stays as it is,
and nothing enters that is not the change in other coordinates. No data is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from symmerge.checkpoints.memory import freed_memory_kept
from symmerge.checkpoints.weights import DerivedWeights, Weights
from symmerge.evaluation.tasks import Task, task_of
from symmerge.matching.efforts import amount_of, learning_rate
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.learning.bundles import Layout, TensorBlock
from symmerge.matching.learning.data import load_data
from symmerge.matching.learning.distillation import DistillationBatch
from symmerge.matching.learning.learner import Learner
from symmerge.matching.learning.mean_module import MeanModule
from symmerge.matching.learning.moving import MovingModel
from symmerge.matching.learning.permutations import FlipSearch
from symmerge.matching.optimization.loop import Hooks, Loop
from symmerge.models.alignment import Alignment
from symmerge.models.canonical.biases import move_value_biases
from symmerge.models.model import Model
from symmerge.models.progress import Phase, ProgressLike, reporter
from symmerge.transporting.differences import difference
from symmerge.transporting.frames import Passage

SCALE_RATE = 3.0  # times the rate of the symmetry
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # tried before learning
FAST_STEPS = 20


@final
@dataclass(frozen=True)
class Learned:
    """A passage made for one change, the scales of its tensors, and the losses on held-out text."""

    passage: Passage
    scales: Mapping[str, float]
    losses: tuple[float, ...] = ()
    steps: int = 0


@freed_memory_kept()
def learn_passage(
    passage: Passage,
    tuned: Model,
    *,
    effort: str = "standard",
    data: Task | None = None,
    steps: int | None = None,
    lr: float | None = None,
    by_module: bool = False,
    seed: int = 0,
    device: str = "cpu",
    progress: ProgressLike = None,
) -> Learned:
    """Learn by which symmetry, and how strongly, a change is carried best.

    Without `data`, on text (or images) that TUNED makes itself. One scale for all is chosen first;
    then every tensor has its own, or `by_module` a weight and its bias have one, as in an adapter.
    """
    tell = reporter(progress)
    tell(Phase("learning how to carry the change"))
    kind = task_of(tuned)
    amount = amount_to_learn(effort, tuned, device)
    if steps:
        amount["steps"] = steps
    options = LearnedMatching(
        data=data,
        start="identity",
        **amount,
        lr=lr or learning_rate(tuned, kind),
        permutations=False,
        seed=seed,
        device=device,
    )
    batches = load_data(options, [tuned], tell)
    objective = CarryObjective(passage, tuned, options, batches.train.device, by_module=by_module)
    scale = objective.choose_scale(batches.evaluation_batches()[:2])
    tell(f"scale of the change: {scale:g}, out of {', '.join(f'{one:g}' for one in SCALES)}")
    learner = Learner(options, objective, batches)  # type: ignore[arg-type]
    history = Loop(learner, learner.plan, Hooks(report=tell)).run_to_best()
    best = objective.member.best.inverse()
    scales = {name: scale * value for name, value in objective.scales.best.items()}
    return Learned(passage.along(best), scales, tuple(history.losses), history.step)


def amount_to_learn(effort: str, tuned: Model, device: str) -> dict[str, Any]:
    """How much is learned; `fast` takes the first steps of `standard`, which gain the most."""
    named, kind = "standard" if effort == "fast" else effort, task_of(tuned)
    # A classifier of texts is read by one answer per row: as many rows as of pictures.
    like = "image" if kind == "text" else kind
    amount = asdict(amount_of(named, tuned, like, device))
    if effort == "fast":
        amount |= {"steps": FAST_STEPS, "generated": amount["generated"] // 2}
    return amount


def balanced(passage: Passage, tuned: Model) -> tuple[Model, Model]:
    """OTHER and the change, each in the balanced frame of its end: sizes are comparable there."""
    end, (of_base, of_other) = move_value_biases(passage.end), passage.balances
    change = difference(passage, tuned)
    return (
        replace(end, weights=_through(of_other, end.weights)).cached(),
        replace(end, weights=_through(of_base, change), moved=None).cached(),
    )


def _through(alignment: Alignment, weights: Weights) -> Weights:
    computed = {
        name: partial(_transported, alignment, weights, name) for name in alignment.spec.tensors
    }
    return DerivedWeights(weights, computed)


def _transported(alignment: Alignment, weights: Weights, name: str) -> Tensor:
    return alignment.transport(name, weights[name])


@final
class Scales:
    """A learned factor per tensor, or per module; to the loop it looks like another member."""

    def __init__(
        self, layout: Layout, lr: float, device: torch.device, *, by_module: bool = False
    ) -> None:
        self.names = [name for stack in layout.stacks for name in stack.names]
        shared = [name.rpartition(".")[0] if by_module else name for name in self.names]
        places = {name: at for at, name in enumerate(dict.fromkeys(shared))}
        self.index = torch.tensor([places[name] for name in shared], device=device)
        self.values = torch.ones(len(places), device=device)
        self.best, self.projections = dict.fromkeys(self.names, 1.0), 0
        captured = device.type == "cuda"
        self.rate = torch.tensor(lr * SCALE_RATE, device=device)
        self.optimizer = torch.optim.Adam(
            [self.values], lr=self.rate, betas=(0.9, 0.99), capturable=captured, foreach=False
        )

    @property
    def by_tensor(self) -> Tensor:
        return self.values[self.index]

    def set_lr(self, lr: float) -> None:
        self.rate.fill_(lr * SCALE_RATE)

    def finite(self) -> bool:
        return bool(self.values.isfinite().all())

    def alignment(self) -> None:
        return None

    def fold(self, _: None) -> None:
        return None

    def keep_best(self) -> None:
        self.best = dict(zip(self.names, self.by_tensor.tolist(), strict=True))

    def follow(self, gradient: Tensor) -> None:
        """One step, from the gradient of each tensor's factor."""
        self.values.grad = torch.zeros_like(self.values).index_add_(0, self.index, gradient)
        self.optimizer.step()


@final
class CarryObjective:
    """OTHER plus a change that moves along its symmetries."""

    def __init__(
        self,
        passage: Passage,
        tuned: Model,
        options: LearnedMatching,
        device: torch.device,
        *,
        by_module: bool = False,
    ) -> None:
        other, change = balanced(passage, tuned)
        layout = Layout.of(other.spec, options.chosen_spaces(other.spec))
        back = Alignment(other.spec, passage.alignment.elements).inverse()
        self.origin, self.scale, self.layout = TensorBlock(layout.stacks, device), 1.0, layout
        for name, tensor in self.origin.tensors.items():
            tensor.copy_(other.weights[name])
        self.member = MovingModel(change, back, layout, options.lr, device)
        self.scales = Scales(layout, options.lr, device, by_module=by_module)
        self.mean = MeanModule(other, layout, device)
        self.members: list[Any] = [self.member, self.scales]
        self.flips = [FlipSearch([], options.flips) for _ in self.members]
        self.one = torch.ones((), device=device)

    def choose_scale(self, batches: Sequence[DistillationBatch]) -> float:
        """The factor of the whole change whose answers are closest to TUNED's."""
        losses: dict[float, float] = {}
        for self.scale in SCALES:
            self.place_midpoint()
            with torch.no_grad():
                losses[self.scale] = self.mean.loss(batches)
        self.scale = min(losses, key=losses.__getitem__)
        return self.scale

    def draw(self, generator: torch.Generator) -> None:
        """Nothing is drawn."""

    @torch.no_grad()
    def place_midpoint(self) -> None:
        """Write OTHER with the carried change to the module."""
        self.member.move()
        for stack, factors in self._factors():
            moved = self.member.moved.stacks[stack]
            torch.addcmul(
                self.origin.stacks[stack], moved, factors, out=self.mean.mean.stacks[stack]
            )

    def _factors(self) -> Any:
        counts = [len(stack.names) for stack in self.layout.stacks]
        parts = (self.scale * self.scales.by_tensor).split(counts)
        for stack, part in zip(self.layout.stacks, parts, strict=True):
            yield stack, part.reshape(-1, *(1 for _ in stack.shape))

    def descend(self, batches: Sequence[DistillationBatch]) -> Tensor:
        self.place_midpoint()
        loss = self.mean.backward(batches, self.one)
        with torch.no_grad():
            by_scale = []
            for stack, factors in self._factors():
                gradient = self.mean.gradient.stacks[stack]
                by_scale.append((gradient * self.member.moved.stacks[stack]).flatten(1).sum(1))
                gradient.mul_(factors)
            self.member.follow(self.mean.gradient)
            self.scales.follow(self.scale * torch.cat(by_scale))
        return loss

    def reassign(self, batches: Sequence[DistillationBatch]) -> None:
        """Permutations stay as they are."""
