"""One run of learned matching: elements that walk along their groups, down the loss of the models between A and B.

Only group elements are trained, so both ends stay exactly the parents. Continuous parts take steps of Adam in their tangent. Permutations are
straight-through: the loss's gradient by each pair of places says what a swap would gain, and every so many steps the assignment is solved anew, between
the weights as they lie and a step down that gradient; how many places flip is kept small, counted, and undone where it does not help.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from symmerge.checkpoints.weights import MemoryWeights
from symmerge.distributed import (
    any_process,
    decided_by_first,
    rank_and_world_size,
    sum_over_processes,
)
from symmerge.errors import MismatchError, SymmergeError, SymmergeWarning
from symmerge.matching.learning.bundles import Block, Bundle, bundles, stacks
from symmerge.matching.learning.distillation import Lesson, Lessons, loss_of
from symmerge.matching.learning.gradients import Slope, bundled_slopes, slopes, whole
from symmerge.matching.learning.samplers import Sampler
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.models.alignment import Alignment, apply
from symmerge.models.model import Model
from symmerge.symmetry.groups import Element
from symmerge.symmetry.groups.indices import assign
from symmerge.symmetry.notation import Role
from symmerge.verification.modules import full_module

if TYPE_CHECKING:
    from symmerge.matching.learned import LearnedMatching

LOOKS = 20  # how often a run is judged on held-out inputs
ASSIGNMENTS = 15  # how often permutations are solved anew, at most: an assignment of a thousand units costs as much as a step
FEWEST_STEPS = 10  # between two of them
NEAR_A = 0.25  # where on the line flips are sought: in the middle two units that are swapped are the same mean, and the gradient does not see it
CLIP = 1.0
MOST_HELD = 8  # batches that a look judges by
JUDGES = 2  # batches that flips are judged by


class Interrupted(Exception):
    """The run ended before its time; the best so far stands."""


@dataclass
class Tally:
    """What a run counted."""

    flips_tried: int = 0
    flips_kept: int = 0
    mended: int = 0
    steps: int = 0
    stopped: str = "all steps done"

    def record(self) -> dict[str, Any]:
        return dict(vars(self))


class Course(ABC):
    """How every run goes: steps with a rate that rises and falls, looks at held-out inputs, assignments solved anew, and an end before its time where need be."""

    options: LearnedMatching
    device: torch.device
    lessons: Lessons
    held: Lessons
    module: nn.Module
    discrete: list[str]

    def _begin(self, options: LearnedMatching, lessons: Lessons, held: Lessons) -> None:
        self.options, self.lessons, self.held, self.device = options, lessons, held, lessons.device
        self.tally, self.losses = Tally(), []
        self.seen_losses = torch.zeros(options.steps + 1, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.long, device=self.device)
        self._recorded: _Recorded | None = None

    @property
    @abstractmethod
    def walking(self) -> Sequence[Learner]:
        """Who moves."""

    @abstractmethod
    def _draw(self, generator: torch.Generator) -> None:
        """Choose the place to learn at."""

    @abstractmethod
    def _to_middle(self) -> None:
        """Put the model that is wanted into the module."""

    @abstractmethod
    def _descend(self, lessons: tuple[Lesson, ...]) -> None:
        """One step."""

    @abstractmethod
    def _reassign(self) -> None:
        """Solve the assignments anew."""

    @abstractmethod
    def _keep(self) -> None:
        """Where everyone lies now is the best so far."""

    def entry(self) -> ResumeEntry | None:
        """All that a run needs to go on, where it can."""
        return None

    def _count(self, loss: Tensor) -> None:
        self.counter += 1
        self.seen_losses.index_copy_(0, self.counter, loss.view(1))

    def _generator(self, step: int, what: int = 0) -> torch.Generator:
        """Of a step's own, so that a run that is taken up again draws what it would have drawn."""
        return torch.Generator().manual_seed((self.options.seed * 1_000_003 + step) * 7 + what)

    def run(self, progress: Callable[[str], None], resume_file: ResumeFile | None = None) -> None:
        options = self.options
        every = max(1, options.steps // LOOKS)
        resolve = max(FEWEST_STEPS, options.steps // ASSIGNMENTS)
        if not self.losses:
            self._look(progress, resume_file)
        while self.tally.steps < options.steps:
            step = self.tally.steps + 1
            self._step(step)
            self.tally.steps = step
            if self.discrete and step % resolve == 0 and step < options.steps:
                self._finite()
                self._reassign()
            if step % every == 0 or step == options.steps:
                self._look(progress, resume_file)
                since = (
                    len(self.losses) - 1 - min(range(len(self.losses)), key=self.losses.__getitem__)
                )
                if since >= options.patience and not (
                    self.discrete and step < 2 * resolve
                ):  # flips of both kinds have their turn
                    self.tally.stopped = f"no better for {since} looks"
                    progress(f"stopped at step {step}: {self.tally.stopped}")
                    return

    def _step(self, step: int) -> None:
        generator, options = self._generator(step), self.options
        lr = options.lr * schedule(step, options.steps)
        rank, processes = rank_and_world_size()
        numbers = torch.randint(
            len(self.lessons), (options.accumulate * processes,), generator=generator
        )[rank::processes]
        chosen = tuple(self.lessons[int(number)] for number in numbers)
        self._draw(generator)
        for walker in self.walking:
            walker._set_lr(lr)
        try:
            if self.device.type == "cuda" and rank_and_world_size()[1] == 1:
                self._recorded = self._recorded or _Recorded(self._descend)
                self._recorded(chosen)
            else:
                self._descend(chosen)
        except torch.cuda.OutOfMemoryError as error:
            remedy = "lower --batch-size and raise --accumulate by as much, or learn fewer --spaces"
            raise SymmergeError(f"the GPU's memory is full at step {step}: {remedy}") from error

    def _finite(self) -> None:
        """Stop where a loss, or an element, is no number any more, in any of the processes."""
        bad = (~self.seen_losses[1 : int(self.counter) + 1].isfinite()).nonzero()
        turned = [
            value
            for walker in self.walking
            for element in walker.turned.values()
            for value in element.values()
        ]
        lost = not all(bool(value.isfinite().all()) for value in turned)
        if any_process(bool(len(bad)) or lost):
            self._stop(
                f"the loss was not finite at step {int(bad[0]) + 1 if len(bad) else self.tally.steps}"
            )

    def _stop(self, why: str) -> NoReturn:
        self.tally.stopped = why
        raise Interrupted(f"{why}: the best state before it is kept; lower --lr")

    @torch.no_grad()
    def _look(self, progress: Callable[[str], None], resume_file: ResumeFile | None) -> None:
        """Judge the middle on held-out inputs; keep the best."""
        self._finite()
        for walker in self.walking:
            walker._fold(walker.alignment())
        self._to_middle()
        held = [self.held[number] for number in range(min(MOST_HELD, len(self.held)))]
        loss = decided_by_first(lambda: self._judged(held))
        if not math.isfinite(loss):
            self._stop(f"the held-out loss was not finite at step {self.tally.steps}")
        better = not self.losses or loss < min(self.losses)
        if better:
            self._keep()
        self.losses.append(loss)
        flips = (
            f", {self.tally.flips_kept} of {self.tally.flips_tried} flips kept"
            if self.discrete
            else ""
        )
        progress(
            f"step {self.tally.steps} of {self.options.steps}: loss of the middle {loss:.4f} on held-out inputs{', the best so far' if better else ''}{flips}"
        )
        if resume_file and (entry := self.entry()):
            resume_file.write(entry)

    def _judged(self, probe: list[Lesson]) -> float:
        return sum(float(loss_of(self.module, lesson)) for lesson in probe) / len(probe)


class Learner(Course):
    """The state of one run for a pair. `best` is the alignment with the lowest loss on held-out inputs so far.

    Of many models each has one, `beside` the first: all share the first one's module, its mean and its gradient.
    """

    def __init__(
        self,
        options: LearnedMatching,
        a: Model,
        b: Model,
        start: Alignment,
        lessons: Lessons,
        held: Lessons,
        spaces: list[str],
        beside: Learner | None = None,
    ) -> None:
        self._begin(options, lessons, held)
        self.table, self.sampler = a.spec, Sampler(options.sampler)
        self.original, self.base, self.best = b, start, start
        self.first: Mapping[
            str, Any
        ] = {}  # how the start was found, for whoever takes the run up again
        # Turning starts at the identity: `base` is what was folded into B's weights, `turned` what has been learned since.
        self.bundled = bundled = beside.bundled if beside else bundles(self.table, spaces)
        self.tangents = {bundle: _zeros(bundle, self.device) for bundle in bundled}
        self.turned = {bundle: _still(bundle, self.device) for bundle in bundled}
        self.discrete = (
            [name for name in spaces if "index" in start[name] and self.table.sizes[name] > 1]
            if options.permutations
            else []
        )
        if not self.tangents and not self.discrete:
            raise MismatchError(
                "nothing can be learned: none of the spaces chosen can move; choose others with --spaces"
            )
        self.stacked = stacked = beside.stacked if beside else stacks(self.table, bundled)
        self.a, self.b, self.moved = (Block(stacked, self.device) for _ in range(3))
        self.mean, self.gradient = (
            (beside.mean, beside.gradient)
            if beside
            else (Block(stacked, self.device) for _ in range(2))
        )
        for name, tensor in self.a.tensors.items():
            tensor.copy_(a.weights[name])
        self.kinds: dict[str, list[str]] = {}
        for name in self.discrete:
            self.kinds.setdefault(name.partition(".")[0], []).append(name)
        self.share, self.turns = dict.fromkeys(self.kinds, options.flips), 0
        self._fold(start)
        if beside:
            self.module, self.holders = beside.module, beside.holders
        else:
            self._build_module(a)
        self.met = {met.piece.tensor for space in spaces for met in self.table.occurrences(space)}
        self.parameters: list[Tensor] = [
            value for parts in self.tangents.values() for value in parts.values()
        ]
        self.t = torch.zeros((), device=self.device)
        recorded = self.device.type == "cuda"
        lr = torch.tensor(options.lr, device=self.device) if recorded else options.lr
        self.optimiser = (
            torch.optim.Adam(
                self.parameters, lr=lr, betas=(0.9, 0.99), capturable=recorded, fused=True
            )
            if self.parameters
            else None
        )

    @property
    def walking(self) -> Sequence[Learner]:
        return (self,)

    def _draw(self, generator: torch.Generator) -> None:
        self.t.fill_(self.sampler.draw(generator))

    def _to_middle(self) -> None:
        self.t.fill_(0.5)
        self._place()

    def _keep(self) -> None:
        self.best = self.base

    def _set_lr(self, lr: float) -> None:
        for group in self.optimiser.param_groups if self.optimiser else ():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _build_module(self, a: Model) -> None:
        """A module whose parameters share the memory of `mean`, with the gradient of each tensor wherever it is used."""
        mean = self.mean.tensors
        self.module = full_module(replace(a, weights=MemoryWeights(mean)), torch.float32)
        self.holders: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            name = self.table.ties.get(name, name)
            if name in mean:
                parameter.data = mean[name]
                parameter.requires_grad_(True)
                self.holders.setdefault(name, []).append(parameter)
        self.module.to(self.device)

    @torch.no_grad()
    def _fold(self, base: Alignment) -> None:
        """Start again from a base: B's weights lie there, and nothing has turned since."""
        self.base = base
        moved = apply(base, self.original)
        for name, tensor in self.b.tensors.items():
            tensor.copy_(moved.weights[name])
        self.moved.whole.copy_(self.b.whole)
        for bundle, element in self.turned.items():
            for part, value in _still(bundle, self.device).items():
                element[part].copy_(value)

    @torch.no_grad()
    def alignment(self) -> Alignment:
        """Where the run is, in float64 and mended: rotations that walked a long way are rotations still, and bases can be inverted."""
        still = Alignment.identity(self.table)
        turned = {
            bundle: {part: value.cpu() for part, value in element.items()}
            for bundle, element in self.turned.items()
        }
        learned = {
            name: {
                part: turned[bundle][part][number] if part in turned[bundle] else value
                for part, value in still[name].items()
            }
            for bundle, number, name in self._spaces()
        }
        found = Alignment(self.table, {**still.elements, **learned}).compose(self.base)
        elements: dict[str, Element] = dict(found.elements)
        for name in learned:
            elements[name], bad = self.table.spaces[name].group.project(elements[name])
            self.tally.mended += bad
        return Alignment(self.table, elements)

    def _spaces(self) -> Iterator[tuple[Bundle, int, str]]:
        """Every space that moves continuously, and where it lies."""
        return (
            (bundle, number, name)
            for bundle in self.tangents
            for number, name in enumerate(bundle.names)
        )

    # one step

    @torch.no_grad()
    def _place(self) -> None:
        """Put the model at t into the module."""
        self._move()
        torch.lerp(self.a.whole, self.moved.whole, self.t, out=self.mean.whole)

    @torch.no_grad()
    def _move(self) -> None:
        """Put B's weights where it lies now into `moved`."""
        turned = {
            bundle: {part: value.float() for part, value in element.items()}
            for bundle, element in self.turned.items()
        }
        for stack, source in self.b.stacks.items():
            stack.transport(turned, source, self.moved.stacks[stack])

    def _descend(self, lessons: tuple[Lesson, ...]) -> None:
        with quick_products(self.device):
            self._place()
            loss = self._pass_back(
                lessons, self.t
            )  # the gradient by B's tensors is t times that by the model's
            with torch.no_grad():
                self._gather()
                self._point_uphill()
                self._together()
                self._walk()
                self._count(loss)

    def _pass_back(self, lessons: Sequence[Lesson], times: Tensor) -> Tensor:
        """The mean loss; so many times its gradients stay in the module."""
        share, losses = times / len(lessons), []
        for lesson in lessons:
            loss = loss_of(self.module, lesson)
            loss.backward(share)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _gather(self) -> None:
        """Put the module's gradients where B's tensors have theirs; a tied tensor's from wherever it is used. What never has any stays zero."""
        into, found = [], []
        for name, holders in self.holders.items():
            parts = [holder.grad for holder in holders if holder.grad is not None]
            if parts and name in self.met:
                into.append(self.gradient.tensors[name])
                found.append(sum(parts[1:], parts[0]))
            for holder in holders:
                holder.grad = None
        _copy(into, found)

    def _point_uphill(self) -> None:
        """Give the tangents their gradients."""
        found = bundled_slopes(self.tangents, self.gradient, self.moved)
        for bundle, parts in self.tangents.items():
            uphill = bundle.group.tangent_gradient(
                found[bundle][Role.WRITES], found[bundle][Role.READS]
            )
            for part, value in parts.items():
                value.grad = uphill[
                    part
                ].contiguous()  # as the parameter is: the fused step takes no other

    def _together(self) -> None:
        """Several processes look at different inputs and take the same step."""
        if rank_and_world_size()[1] == 1:
            return
        mine = {
            f"{number}": value.grad
            for number, value in enumerate(self.parameters)
            if value.grad is not None
        }
        for name, total in sum_over_processes(mine).items():
            mine[name].copy_(total / rank_and_world_size()[1])

    @torch.no_grad()
    def _walk(self) -> None:
        if self.optimiser is None:
            return
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimiser.step()
        into, found = [], []
        for bundle, parts in self.tangents.items():
            element = bundle.group.retract(
                self.turned[bundle], {part: value.double() for part, value in parts.items()}
            )
            into += self.turned[bundle].values()
            found += [element[part] for part in self.turned[bundle]]
        _copy(into, found)
        torch._foreach_zero_(self.parameters)  # type: ignore[reportPrivateImportUsage]

    # permutations

    @torch.no_grad()
    def _reassign(self) -> None:
        """Solve the assignments anew and keep what a few batches agree with, one kind of space after the other.

        Two proposals take turns: a step down the gradient, and what is most alike now that everything else has moved.
        """
        lessons = torch.randperm(len(self.lessons), generator=self._generator(self.tally.steps, 1))[
            :JUDGES
        ]
        probe = [self.lessons[int(number)] for number in lessons]
        self.turns += 1
        downhill = self._downhill(probe) if self.turns % 2 else {}
        self.t.fill_(0.5)
        self._place()
        now = self._judged(probe)
        for kind, names in self.kinds.items():
            order = self._proposed(names, downhill, kind)
            tried = sum(
                int((index != torch.arange(index.shape[-1])).sum()) for index in order.values()
            )
            if not tried:
                continue
            here = self.alignment()
            self._fold(self._flipped(order, here))
            self._place()
            after = self._judged(probe)
            self.tally.flips_tried += tried
            if decided_by_first(lambda after=after, now=now: after < now):
                now = after
                self.tally.flips_kept += tried
                self.share[kind] = min(self.options.flips, self.share[kind] * 1.5)
            else:
                self._fold(here)
                self._place()
                self.share[kind] /= 2

    def _downhill(self, probe: list[Lesson]) -> dict[str, Slope]:
        self.t.fill_(NEAR_A)
        self._place()
        with torch.enable_grad():
            self._pass_back(probe, self.t)
        self._gather()
        return slopes(self.table, self.discrete, self.gradient.tensors, self.moved.tensors)

    def _proposed(
        self, names: list[str], downhill: Mapping[str, Slope], kind: str
    ) -> dict[str, Tensor]:
        moved = self.moved.tensors
        if downhill:
            grams = slopes(self.table, names, moved, moved)
            return {
                name: reassign(whole(grams[name]), whole(downhill[name]), self.share[kind])
                for name in names
            }
        return {
            name: assign(whole(found))
            for name, found in slopes(self.table, names, self.a.tensors, moved).items()
        }

    def _flipped(self, order: Mapping[str, Tensor], here: Alignment) -> Alignment:
        still = Alignment.identity(self.table)
        flips = {name: {**still[name], "index": index} for name, index in order.items()}
        return Alignment(self.table, {**still.elements, **flips}).compose(here)

    # taking a run up again

    def entry(self) -> ResumeEntry:
        """All that a run needs to go on."""
        state = {}
        if self.optimiser and self.optimiser.state:
            for which in ("exp_avg", "exp_avg_sq"):
                state[which] = {
                    name: {
                        part: self.optimiser.state[value][which][number].cpu()
                        for part, value in self.tangents[bundle].items()
                    }
                    for bundle, number, name in self._spaces()
                }
        record = {
            "start": self.first,
            "learned": {
                "losses": self.losses,
                "share": self.share,
                "turns": self.turns,
                "tally": self.tally.record(),
            },
        }
        return ResumeEntry(
            record, {"current": self.base.elements, "best": self.best.elements, **state}
        )

    def restore(self, entry: ResumeEntry) -> None:
        known = entry.record["learned"]
        self.losses, self.tally = list(known["losses"]), Tally(**known["tally"])
        self.share, self.turns = dict(known["share"]), known["turns"]
        current, self.best = (
            Alignment(self.table, entry.elements[which]) for which in ("current", "best")
        )
        self._fold(current)
        self.counter.fill_(self.tally.steps)
        for bundle, parts in self.tangents.items() if "exp_avg" in entry.elements else ():
            for part, value in parts.items():
                kept = {
                    which: torch.stack([entry.elements[which][name][part] for name in bundle.names])
                    for which in ("exp_avg", "exp_avg_sq")
                }
                assert self.optimiser
                self.optimiser.state[value] = {
                    name: kept.to(self.device)
                    for name, kept in {
                        "step": torch.tensor(float(self.tally.steps)),
                        **kept,
                    }.items()
                }


def schedule(step: int, steps: int) -> float:
    """How much of the rate a step has: warm-up over a tenth of them, then a cosine."""
    return min(step / max(1, steps // 10), 0.5 * (1 + math.cos(math.pi * step / (steps + 1))))


def reassign(gram: Tensor, downhill: Tensor, share: float) -> Tensor:
    """The permutation nearest to a step down the gradient.

    `gram` is the moved weights times themselves, `downhill` their gradient times the weights. A step of length r moves the weights to where the best assignment
    is that of `gram - r downhill`; r is such that about `share` of the places would rather swap, two at a time.
    """
    n = gram.shape[-1]
    own, gain = (matrix.diagonal(dim1=-2, dim2=-1) for matrix in (gram, downhill))
    apart = own[..., :, None] + own[..., None, :] - gram - gram.mT
    gained = gain[..., :, None] + gain[..., None, :] - downhill - downhill.mT
    ratio = torch.where(gained > 0, apart.clamp_min(0) / gained, torch.inf)
    nearest = ratio.flatten(0, -2).amin(-1).sort().values
    at = min(len(nearest) - 1, max(1, math.ceil(share * len(nearest))))
    length = (
        nearest[at] * 1.01
    )  # past the last of them: at that very length it is a tie, and rounding would decide
    if not bool(length.isfinite()):
        return torch.arange(n).expand(gram.shape[:-1]).clone()
    return assign(gram - length * downhill)


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """Products of float32 in TF32, on a GPU: ten bits of each number, where the model that they are for is run in bfloat16, which keeps seven."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    kept = getattr(
        matmul, "fp32_precision", None
    )  # torch 2.9 and newer have both settings, and refuse to run where they disagree: the older one sets both
    before = matmul.allow_tf32 if kept is None else kept == "tf32"
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = before
        if kept is not None:
            matmul.fp32_precision = kept


class _Recorded:
    """A step as one CUDA graph: small models wait for Python otherwise. Inputs of another shape get a graph of their own."""

    def __init__(self, step: Callable[[tuple[Lesson, ...]], None]) -> None:
        self.step, self.graphs, self.side, self.waited = step, {}, torch.cuda.Stream(), set[Any]()

    def __call__(self, lessons: tuple[Lesson, ...]) -> None:
        key = tuple(
            (name, tuple(tensor.shape))
            for lesson in lessons
            for name, tensor in _flat(lesson).items()
        )
        if key in self.graphs:
            self._replay(key, lessons)
            return
        # A real step, in the stream that records: what is allocated once is there then. If it waits for the GPU anywhere, it cannot be recorded.
        self.side.wait_stream(torch.cuda.current_stream())
        with warnings.catch_warnings(record=True) as told, torch.cuda.stream(self.side):
            torch.cuda.set_sync_debug_mode("warn")
            warnings.simplefilter("always")
            told.clear()  # that this mode is new is told, too
            try:
                self.step(lessons)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(self.side)
        waits = [
            f"{one.filename}:{one.lineno}" for one in told if "synchronizing" in str(one.message)
        ]
        if (
            waits and key not in self.waited
        ):  # what is made once and kept may have been: the next step tells
            self.waited.add(key)
            return
        if waits:
            warnings.warn(
                f"steps wait for the GPU ({waits[0]}), so they are not recorded as one, and slower",
                SymmergeWarning,
                stacklevel=2,
            )
        self.graphs[key] = None if waits else self._record(lessons)

    def _replay(self, key: Any, lessons: tuple[Lesson, ...]) -> None:
        if self.graphs[key] is None:
            self.step(lessons)
            return
        graph, inputs = self.graphs[key]
        for still, lesson in zip(inputs, lessons, strict=True):
            for name, tensor in _flat(lesson).items():
                _flat(still)[name].copy_(tensor)
        graph.replay()

    def _record(
        self, lessons: tuple[Lesson, ...]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Lesson, ...]]:
        inputs = tuple(
            Lesson(
                {name: tensor.clone() for name, tensor in lesson.inputs.items()},
                *(None if part is None else part.clone() for part in lesson[1:]),
            )
            for lesson in lessons
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.side):
            self.step(inputs)
        return graph, inputs


def _flat(lesson: Lesson) -> dict[str, Tensor]:
    others = {"places": lesson.places, "weights": lesson.weights, "wanted": lesson.wanted}
    return {
        **lesson.inputs,
        **{f"/{name}": tensor for name, tensor in others.items() if tensor is not None},
    }


def _zeros(bundle: Bundle, device: torch.device) -> dict[str, nn.Parameter]:
    shapes = {
        part: (len(bundle.names), *bundle.batch, *shape)
        for part, shape in bundle.group.tangent().items()
    }
    return {part: nn.Parameter(torch.zeros(shape, device=device)) for part, shape in shapes.items()}


def _copy(into: list[Tensor], found: list[Tensor]) -> None:
    """In one kernel, where they lie alike in memory."""
    torch._foreach_copy_(into, found)  # type: ignore[reportPrivateImportUsage]


def _still(bundle: Bundle, device: torch.device) -> dict[str, Tensor]:
    return {
        part: value.to(device)
        for part, value in bundle.group.start((len(bundle.names), *bundle.batch)).items()
    }
