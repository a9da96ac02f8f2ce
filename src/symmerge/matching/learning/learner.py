"""`Learner`: learned matching, as the optimisation loop drives it.

Only group elements are learned, so both ends stay exactly the parents.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from symmerge.distributed import any_process, decided_by_first, rank_and_world_size
from symmerge.errors import MismatchError, SymmergeError
from symmerge.matching.learning.bundles import Layout, TensorBlock
from symmerge.matching.learning.circuits import CircuitFactors
from symmerge.matching.learning.data import LearningData
from symmerge.matching.learning.distillation import DistillationBatch
from symmerge.matching.learning.joint import JointObjective
from symmerge.matching.learning.mean_module import MeanModule
from symmerge.matching.learning.moving import MovingModel
from symmerge.matching.learning.pair import PairObjective
from symmerge.matching.learning.permutations import FlipSearch
from symmerge.matching.learning.samplers import Sampler, Shares
from symmerge.matching.learning.segment import Segment
from symmerge.matching.optimization.buffers import StepLosses
from symmerge.matching.optimization.graphs import StepGraphs
from symmerge.matching.optimization.loop import (
    Evaluation,
    History,
    LoopPlan,
    NotFinite,
    evenly,
    require_finite,
)
from symmerge.matching.optimization.precision import tf32_matmuls
from symmerge.matching.optimization.schedules import LearningRate
from symmerge.matching.resume import ResumeEntry
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model

if TYPE_CHECKING:
    from symmerge.matching.learned import LearnedMatching

ASSIGNMENTS = 15  # per run at most: an assignment of a thousand units costs as much as a step
MIN_STEPS_BETWEEN = 10  # between two assignments
FLIP_BATCHES = 2  # on which flips are tried


@runtime_checkable
class Objective(Protocol):
    """Models whose mean is optimised: a pair, or many."""

    mean: MeanModule
    members: list[MovingModel]
    flips: list[FlipSearch]

    def draw(self, generator: torch.Generator) -> None:
        """Sample where to learn: the weights of the mean."""
        ...

    def place_midpoint(self) -> None:
        """Put the mean with equal weights into the mean module."""
        ...

    def descend(self, batches: Sequence[DistillationBatch]) -> Tensor:
        """One step of all members; returns the loss before it."""
        ...

    def reassign(self, batches: Sequence[DistillationBatch]) -> None:
        """Solve the permutations again."""
        ...


@final
class Learner:
    """Steps, evaluations and assignments of one run."""

    def __init__(self, options: LearnedMatching, objective: Objective, data: LearningData) -> None:
        self.options, self.objective, self.data = options, objective, data
        self.steps, self.device = options.total_steps(len(data.train)), data.train.device
        self.rate = LearningRate(
            lr=options.lr, steps=self.steps, warmup=self.steps // 10, overlap=True
        )
        self.losses = StepLosses(self.steps, self.device)
        self.permutes = bool(objective.flips[0].spaces)
        self.steps_between = max(MIN_STEPS_BETWEEN, self.steps // ASSIGNMENTS)
        self._graphs: StepGraphs | None = None

    @property
    def plan(self) -> LoopPlan:
        """Long enough for both kinds of flips to be tried before patience ends the run."""
        least = 2 * self.steps_between if self.permutes else 0
        return evenly(self.steps, patience=self.options.patience, least_steps=least)

    def _generator(self, step: int, purpose: int = 0) -> torch.Generator:
        """One per step, so that a resumed run draws what it would have drawn."""
        return torch.Generator().manual_seed((self.options.seed * 1_000_003 + step) * 7 + purpose)

    def advance(self, step: int) -> int:
        step += 1
        generator = self._generator(step)
        batches = self._draw_batches(generator)
        self.objective.draw(generator)
        for member in self.objective.members:
            member.set_lr(self.rate.at(step - 1))
        try:
            self._take_step(batches)
        except torch.cuda.OutOfMemoryError as error:
            remedy = "lower --batch-size and raise --accumulate by as much, or learn fewer --spaces"
            raise SymmergeError(f"the GPU's memory is full at step {step}: {remedy}") from error
        return step

    def _draw_batches(self, generator: torch.Generator) -> tuple[DistillationBatch, ...]:
        rank, processes = rank_and_world_size()
        count = self.options.accumulate * processes
        numbers = torch.randint(len(self.data.train), (count,), generator=generator)
        return tuple(self.data.train[int(number)] for number in numbers[rank::processes])

    def _take_step(self, batches: tuple[DistillationBatch, ...]) -> None:
        if self.device.type == "cuda" and rank_and_world_size()[1] == 1:
            self._graphs = self._graphs or StepGraphs(self.descend)
            self._graphs(batches)
        else:
            self.descend(batches)

    def descend(self, batches: tuple[DistillationBatch, ...]) -> None:
        """The part of a step that can be captured as a CUDA graph."""
        with tf32_matmuls(self.device):
            loss = self.objective.descend(batches)
            self.losses.add(loss)

    def after_step(self, step: int) -> None:
        """Solve the permutations again, every `steps_between` steps."""
        if not self.permutes or step % self.steps_between or step >= self.steps:
            return
        self._check_finite(step)
        order = torch.randperm(len(self.data.train), generator=self._generator(step, 1))
        self.objective.reassign([self.data.train[int(at)] for at in order[:FLIP_BATCHES]])

    def _check_finite(self, step: int) -> None:
        """Raise in all processes if any has diverged, so that none waits for another."""
        wrong = self.losses.first_not_finite()
        lost = not all(member.finite() for member in self.objective.members)
        if any_process(wrong is not None or lost):
            raise NotFinite(f"the loss was not finite at step {wrong or step}")

    @torch.no_grad()
    def evaluate(self, step: int) -> Evaluation:
        """The midpoint's loss. Folds all members, because a saved state holds no unfolded steps."""
        self._check_finite(step)
        for member in self.objective.members:
            member.fold(member.alignment())
        self.objective.place_midpoint()
        batches = self.data.evaluation_batches()
        loss = decided_by_first(lambda: self.objective.mean.loss(batches))
        counts = self.counts()
        flips = f", {counts['flips_kept']} of {counts['flips_tried']} flips kept"
        note = f" at the midpoint{flips if self.permutes else ''}"
        return Evaluation(require_finite(loss, "held-out loss", step), note)

    def keep_best(self) -> None:
        for member in self.objective.members:
            member.keep_best()

    def counts(self) -> dict[str, int]:
        return {
            "flips_tried": sum(flips.tried for flips in self.objective.flips),
            "flips_kept": sum(flips.kept for flips in self.objective.flips),
            "projected": sum(member.projections for member in self.objective.members),
        }

    def record(self, history: History) -> dict[str, object]:
        """What the run did, for solution.json."""
        ended = {"steps": history.step, "stopped": history.stopped}
        ended |= {"target": self.data.train.target}
        # Rounding depends on them: results agree, but not to the last bit.
        return {**self.counts(), **ended, "threads": torch.get_num_threads()}

    def state(self, history: History) -> ResumeEntry:
        """The state of a pair; runs of many models cannot be resumed."""
        (member,), (flips,) = self.objective.members, self.objective.flips
        record = {
            "history": history.to_json(),
            "shares": flips.shares,
            "turns": flips.turns,
            **self.counts(),
        }
        return ResumeEntry({"learned": record}, member.state())

    def restore(self, state: ResumeEntry) -> History:
        (member,), (flips,) = self.objective.members, self.objective.flips
        record = state.record["learned"]
        history = History(**record["history"])
        flips.shares, flips.turns = dict(record["shares"]), record["turns"]
        flips.tried, flips.kept = record["flips_tried"], record["flips_kept"]
        member.restore(state.elements, history.step)
        member.projections = record["projected"]
        self.losses.step.fill_(history.step)
        return history


def pair_learner(
    options: LearnedMatching,
    a: Model,
    b: Model,
    start: Alignment,
    data: LearningData,
    circuits: Set[str] = frozenset(),
) -> Learner:
    """A learner that moves `b` towards `a`; `circuits` are spaces of doubled heads."""
    device, layout = data.train.device, Layout.of(a.spec, options.chosen_spaces(a.spec))
    flips = _flip_search(options, layout, start)
    member = MovingModel(b, start, layout, options.lr, device)
    factors = CircuitFactors(layout, circuits, device) if circuits else None
    mean = MeanModule(a, layout, device)
    segment = Segment(_block(a, layout, device), member, mean, factors)
    return Learner(options, PairObjective(segment, flips, Sampler(options.sampler)), data)


def joint_learner(
    options: LearnedMatching,
    reference: Model,
    models: Sequence[Model],
    starts: Sequence[Alignment],
    data: LearningData,
) -> Learner:
    """A learner that moves all models but the reference."""
    device = data.train.device
    layout = Layout.of(reference.spec, options.chosen_spaces(reference.spec))
    flips = [_flip_search(options, layout, starts[0]) for _ in models]
    members = [
        MovingModel(model, start, layout, options.lr, device)
        for model, start in zip(models, starts, strict=True)
    ]
    block, mean = _block(reference, layout, device), MeanModule(reference, layout, device)
    objective = JointObjective(block, members, flips, mean, Shares(options.concentration))
    return Learner(options, objective, data)


def _flip_search(options: LearnedMatching, layout: Layout, start: Alignment) -> FlipSearch:
    """Flips for spaces with permutations; refuses a layout where nothing can move."""
    sizes = layout.table.sizes
    spaces = [name for name in layout.spaces if "index" in start[name] and sizes[name] > 1]
    flips = FlipSearch(spaces if options.permutations else [], options.flips)
    if not layout.bundles and not flips.spaces:
        raise MismatchError(
            "nothing can be learned: no chosen space can move; choose others with --spaces"
        )
    return flips


def _block(model: Model, layout: Layout, device: torch.device) -> TensorBlock:
    block = TensorBlock(layout.stacks, device)
    for name, tensor in block.tensors.items():
        tensor.copy_(model.weights[name])
    return block
