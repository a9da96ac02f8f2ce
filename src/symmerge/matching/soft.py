"""Soft permutations: doubly stochastic matrices in the place of permutations, learned down the loss of the models between A and B.

A published relaxation, for comparison. Units and heads may mix, so the middle can get better than permutations make it, and the far end is no longer the
function of B. So what was learned is hardened, too: the permutations nearest to the matrices are a symmetry again, with exact ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from symmerge.checkpoints.weights import MemoryWeights
from symmerge.distributed import rank_and_world_size
from symmerge.errors import MismatchError, SymmergeError
from symmerge.evaluation.tasks.base import Task
from symmerge.matching.base import Solution
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.learning.distillation import Lesson, Lessons, Target, loss_of
from symmerge.matching.learning.learner import CLIP, LOOKS, MOST_HELD, Interrupted, schedule
from symmerge.matching.learning.samplers import Sampler
from symmerge.matching.learning.soft_permutations import (
    LATENT,
    MATRIX,
    SINKHORN,
    first_latent,
    hardened,
    relax,
    sharp,
    sinkhorn,
    soft_table,
)
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.matching.search import Matching
from symmerge.models.alignment import Alignment, apply
from symmerge.models.model import Model, Progress
from symmerge.models.tables import check_same_table
from symmerge.symmetry.groups import Permutation
from symmerge.symmetry.groups.indices import assign
from symmerge.symmetry.spec import Spec
from symmerge.verification.modules import full_module
from symmerge.verification.verdict import verify

Matrices = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class SoftMatching:
    """Options of soft permutations: `SoftMatching(data=make_task("image", "digits:train", [a, b]))`.

    Spaces that are permuted without signs and scales mix; all others stay as the start found them. `sinkhorn` is how often rows and columns are normalised,
    `noise` how much of everything else each place gets to begin with, as a share of the usual size of fresh weights: without noise hardly anything can be
    learned, with much of it the start is lost. The other options are those of `LearnedMatching`.
    """

    data: Task | None = field(default=None, repr=False)
    start: Matching | Alignment | Literal["identity"] | None = None
    steps: int = 300
    lr: float = 1e-1
    batch_size: int | None = None
    sampler: str = "narrow"
    target: Target = "parents"
    spaces: tuple[str, ...] | None = None
    sinkhorn: int = SINKHORN
    noise: float = 1e-2
    held_out: float = 0.1
    seed: int = 0
    device: str = "cpu"
    method: ClassVar[str] = "soft"

    def __post_init__(self) -> None:
        self._exact()
        if self.sinkhorn < 1:
            raise MismatchError(
                f"sinkhorn {self.sinkhorn}: rows and columns must be normalised at least once; {SINKHORN} is usual"
            )
        if not 0 <= self.noise < math.inf:
            raise MismatchError(f"noise {self.noise}: give 0 or a small number such as 0.01")
        if self.target not in get_args(Target):
            raise MismatchError(f"target {self.target}: there are {', '.join(get_args(Target))}")

    def _exact(self) -> LearnedMatching:
        """The method whose elements stay symmetries, with the same options: what both do alike, and which options both refuse, is said there."""
        return LearnedMatching(
            **{
                item.name: getattr(self, item.name)
                for item in fields(self)
                if item.name not in ("sinkhorn", "noise")
            }
        )

    def record(self) -> dict[str, Any]:
        """The options, for solution.json."""
        plain = {
            name: value
            for name, value in asdict(replace(self, data=None, start=None)).items()
            if name not in ("data", "start")
        }
        exact = self._exact().record()
        return {**plain, "data": exact["data"], "start": exact["start"]}

    def chosen(self, table: Spec) -> list[str]:
        """The spaces that mix."""
        found = [
            name
            for name in self._exact().chosen(table)
            if isinstance(table.spaces[name].group, Permutation) and table.sizes[name] > 1
        ]
        if not found:
            raise MismatchError(
                "nothing can mix: none of the spaces chosen is permuted without signs and scales; choose others with --spaces, or restrict some to permutations"
            )
        return found

    def solve(
        self,
        a: Model,
        b: Model,
        *,
        progress: Progress | None = None,
        resume_file: ResumeFile | None = None,
    ) -> Solution:
        """Align `b` to `a`. Preconditions: both canonical, and of the same table. Ctrl-C returns the best so far."""
        began = time.perf_counter()
        check_same_table([a, b], "aligned")
        spaces = self.chosen(a.spec)
        entry = resume_file.read() if resume_file else None
        entry = entry if entry and "soft" in entry.record else None
        if rank_and_world_size()[
            0
        ]:  # of several processes, which all do the same here, the first one speaks and keeps the journal
            progress, resume_file = None, None
        progress = progress or (lambda line: None)
        found = (
            Solution(alignment=Alignment(a.spec, entry.elements["start"]))
            if entry
            else self._exact().first_solution(a, b, progress, resume_file)
        )
        if found.interrupted:
            return found
        run = _Run(self, a, b, found.alignment, spaces, *self._exact().lessons([a, b], progress))
        if entry:
            run.restore(entry)
        interrupted = False
        try:
            run.run(progress, resume_file)
        except KeyboardInterrupt:
            interrupted = True
            run.stopped = "interrupted"
        except Interrupted as reason:
            progress(str(reason))
        return replace(
            self._hardened(run, b, found, interrupted, progress),
            seconds=time.perf_counter() - began,
        )

    def _hardened(
        self, run: _Run, b: Model, start: Solution, interrupted: bool, progress: Progress
    ) -> Solution:
        """The symmetry nearest to what was learned, and how far that is from it."""
        relaxed = run.relaxed()
        found = replace(
            start,
            alignment=hardened(relaxed, b.spec).compose(start.alignment),
            objective=tuple(run.losses),
            by_space={},
            converged=not interrupted,
            interrupted=interrupted,
            distance=math.nan,
            correlations=None,
            relaxed=relaxed,
        )
        numbers = run.numbers(relaxed)
        numbers["end"]["function"] = verify(b, relax(found, b)).difference
        progress(_told(numbers))
        return replace(found, options=self.record(), scored_on="held-out inputs", soft=numbers)


def _told(numbers: Mapping[str, Any]) -> str:
    middle, end = numbers["middle"], numbers["end"]
    return (
        f"loss of the middle on held-out inputs: start {middle['start']:.4f}, soft {middle['soft']:.4f}, hardened {middle['hardened']:.4f};"
        f" the soft end is not B: logits differ by {end['function']:.1e}, its loss by {end['loss']:+.4f}"
    )


class _Judge(nn.Module):
    """The loss as a module, so that it can be given weights that remember where they come from."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, lesson: Lesson) -> Tensor:
        return loss_of(self.module, lesson)


class _Run:
    """One run: latent matrices on the way down, and the best of them by the loss of the middle on held-out inputs.

    B is moved exactly to where the start says; matrices mix from there, and begin at the identity.
    """

    def __init__(
        self,
        options: SoftMatching,
        a: Model,
        b: Model,
        start: Alignment,
        spaces: list[str],
        lessons: Lessons,
        held: Lessons,
    ) -> None:
        self.options, self.start, self.lessons, self.held = options, start, lessons, held
        self.table, self.sampler = soft_table(a.spec, spaces), Sampler(options.sampler)
        moved = apply(start, b)
        self.a, self.b = (
            {name: model.weights[name].to(lessons.device, torch.float32) for name in a.spec.tensors}
            for model in (a, moved)
        )
        self.mixed = {met.piece.tensor for name in spaces for met in self.table.occurrences(name)}
        self.judge = _Judge(
            full_module(replace(a, weights=MemoryWeights(self.a)), torch.float32).to(lessons.device)
        )
        generator = torch.Generator().manual_seed(options.seed)
        first = {
            name: first_latent(
                self.table.sizes[name], self.table.batch(name), options.noise, generator
            )
            for name in spaces
        }
        self.latent = {
            name: nn.Parameter(value.to(lessons.device, torch.float32))
            for name, value in first.items()
        }
        self.best = self._copied()
        self.optimiser = torch.optim.Adam(self.latent.values(), lr=options.lr, betas=(0.9, 0.99))
        self.losses: list[float] = []
        self.steps, self.stopped = 0, "all steps done"

    def _copied(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.latent.items()}

    # the loss

    def _weights(self, matrices: Matrices, t: float) -> dict[str, Tensor]:
        """Of the model at `t` between A and B mixed, by the names of the judge's parameters."""
        soft = Alignment(self.table, {name: {MATRIX: matrix} for name, matrix in matrices.items()})
        moved = {
            name: soft.transport(name, tensor) if name in self.mixed else tensor
            for name, tensor in self.b.items()
        }
        found = {name: torch.lerp(self.a[name], tensor, t) for name, tensor in moved.items()}
        shared = {alias: found[target] for alias, target in self.table.ties.items()}
        return {f"module.{name}": tensor for name, tensor in {**found, **shared}.items()}

    @torch.no_grad()
    def loss(self, matrices: Matrices, t: float) -> float:
        """On held-out inputs."""
        weights, number = self._weights(matrices, t), min(MOST_HELD, len(self.held))
        return (
            sum(
                float(functional_call(self.judge, weights, (self.held[at],)))
                for at in range(number)
            )
            / number
        )

    # the run

    def run(self, progress: Progress, resume_file: ResumeFile | None) -> None:
        steps = self.options.steps
        every = max(1, steps // LOOKS)
        if not self.losses:
            self._look(progress, resume_file)
        while self.steps < steps:
            self._step(self.steps + 1)
            self.steps += 1
            if self.steps % every == 0 or self.steps == steps:
                self._look(progress, resume_file)

    def _step(self, step: int) -> None:
        # A generator of the step's own, so that a run that is taken up again draws what it would have drawn.
        options, generator = (
            self.options,
            torch.Generator().manual_seed(self.options.seed * 1_000_003 + step),
        )
        lesson, t = (
            self.lessons[int(torch.randint(len(self.lessons), (), generator=generator))],
            self.sampler.draw(generator),
        )
        self.optimiser.param_groups[0]["lr"] = options.lr * schedule(step, options.steps)
        self.optimiser.zero_grad()
        try:
            # Computed again on the way back: all the normalisations of all layers of thousands of units would not fit.
            again = partial(
                checkpoint,
                sinkhorn,
                times=options.sinkhorn,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            loss = functional_call(
                self.judge,
                self._weights({name: again(latent) for name, latent in self.latent.items()}, t),
                (lesson,),
            )
            loss.backward()
        except torch.cuda.OutOfMemoryError as error:
            raise SymmergeError(
                f"the GPU's memory is full at step {step}: lower --batch-size, or learn fewer --spaces"
            ) from error
        self._finite(float(loss.detach()), "loss", step)
        nn.utils.clip_grad_norm_(self.latent.values(), CLIP)
        self.optimiser.step()

    def _finite(self, loss: float, what: str, step: int) -> None:
        if not math.isfinite(loss):
            self.stopped = f"the {what} was not finite at step {step}"
            raise Interrupted(f"{self.stopped}: the best state before it is kept; lower --lr")

    @torch.no_grad()
    def _look(self, progress: Progress, resume_file: ResumeFile | None) -> None:
        """Judge the middle on held-out inputs; keep the best."""
        loss = self.loss(
            {name: sinkhorn(latent, self.options.sinkhorn) for name, latent in self.latent.items()},
            0.5,
        )
        self._finite(loss, "held-out loss", self.steps)
        better = not self.losses or loss < min(self.losses)
        self.best = self._copied() if better else self.best
        self.losses.append(loss)
        progress(
            f"step {self.steps} of {self.options.steps}: loss of the middle {loss:.4f} on held-out inputs{', the best so far' if better else ''}"
        )
        if resume_file:
            resume_file.write(self.entry())

    # what was found

    def relaxed(self) -> Alignment:
        """The best matrices, in float64: they act on B where the start has put it."""
        found = {
            name: sinkhorn(latent.double().cpu(), self.options.sinkhorn)
            for name, latent in self.best.items()
        }
        return Alignment(self.table, {name: {MATRIX: matrix} for name, matrix in found.items()})

    def numbers(self, relaxed: Alignment) -> dict[str, Any]:
        """How far from permutations, and what that does to the middle and to B's end."""
        soft = {name: element[MATRIX] for name, element in relaxed.elements.items()}
        order = {name: assign(matrix) for name, matrix in soft.items()}
        still = {
            name: torch.arange(index.shape[-1]).expand_as(index) for name, index in order.items()
        }
        ways = {
            "start": {name: sharp(index) for name, index in still.items()},
            "soft": soft,
            "hardened": {name: sharp(index) for name, index in order.items()},
        }
        flips = sum(int((index != still[name]).sum()) for name, index in order.items())
        return {
            "spaces": len(soft),
            "softness": _mean([float((1 - matrix.amax(-1)).mean()) for matrix in soft.values()]),
            "flipped": flips / sum(index.numel() for index in order.values()),
            "rows_off_one": max(
                float((matrix.sum(-1) - 1).abs().max()) for matrix in soft.values()
            ),
            "middle": {way: self.loss(matrices, 0.5) for way, matrices in ways.items()},
            "end": {"loss": self.loss(soft, 1.0) - self.loss(ways["start"], 1.0)},
            "steps": self.steps,
            "stopped": self.stopped,
        }

    # taking a run up again

    def entry(self) -> ResumeEntry:
        """All that a run needs to go on."""
        states = {"current": self._copied(), "best": self.best}
        for which in ("exp_avg", "exp_avg_sq") if self.optimiser.state else ():
            states[which] = {
                name: self.optimiser.state[value][which] for name, value in self.latent.items()
            }
        elements = {
            which: {name: {LATENT: value.cpu()} for name, value in state.items()}
            for which, state in states.items()
        }
        return ResumeEntry(
            {"soft": {"losses": self.losses, "steps": self.steps}},
            {"start": self.start.elements, **elements},
        )

    @torch.no_grad()
    def restore(self, entry: ResumeEntry) -> None:
        known, device = entry.record["soft"], self.lessons.device
        self.losses, self.steps = list(known["losses"]), known["steps"]
        self.best = {
            name: element[LATENT].to(device) for name, element in entry.elements["best"].items()
        }
        for name, value in self.latent.items():
            value.copy_(entry.elements["current"][name][LATENT])
            if "exp_avg" in entry.elements:
                kept = {
                    which: entry.elements[which][name][LATENT].to(device)
                    for which in ("exp_avg", "exp_avg_sq")
                }
                self.optimiser.state[value] = {"step": torch.tensor(float(self.steps)), **kept}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
