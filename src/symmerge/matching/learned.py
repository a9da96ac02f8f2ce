"""Learned matching: move the elements themselves, by gradient, so that the models between A and B get better.

Only group elements are trained: both ends stay exactly the parents, and every merge is a stock checkpoint. The target is what the parents predict
together, so no label is needed, and no data either where the parents write their own, or look at pictures that are drawn for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, final, get_args

import torch

from symmerge.distributed import decided_by_first, local_device, rank_and_world_size
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks.base import UNLABELLED, Task, subsample
from symmerge.evaluation.tasks.catalog import SELF_LABELLED, SELF_SOURCES, make_task, task_of
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.base import Solution, Trial
from symmerge.matching.evidence import Weighting
from symmerge.matching.learning.distillation import Lessons, Target, shuffled, usual_batch_size
from symmerge.matching.learning.joint import Joint
from symmerge.matching.learning.learner import Interrupted, Learner
from symmerge.matching.learning.samplers import DIRICHLET, Sampler, Shares
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.matching.search import Matching
from symmerge.matching.universes import Universe
from symmerge.matching.weights import WeightMatching
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model, Progress, device_of
from symmerge.models.tables import check_same_table
from symmerge.symmetry.spec import Spec, listing
from symmerge.verification.modules import full_module

PARTS = {
    "residual": ("residual",),
    "heads": ("head", "query", "qk", "vo"),
    "ff": ("ff",),
    "classifier": ("pooled", "classifier", "transform"),
}
"""What moves, in words; the spaces that belong to each."""
SAMPLES = {
    "clm": 2000,
    "mlm": 4000,
    "image": 10_000,
    "text": 10_000,
}  # to learn from: as many as there are, up to these
OWN_SAMPLES = {
    "clm": 512,
    "mlm": 1024,
    "image": 4000,
}  # of text the parents write or pictures that are drawn, where there is no data
FIRST_SAMPLES = {
    "clm": 24,
    "mlm": 48,
    "image": 256,
    "text": 256,
}  # of them, for the start by activations: more have not helped


def most_inputs(kind: str, data: str) -> int | None:
    """How many inputs of a kind of task are learned from, as far as there are so many, where nobody says."""
    return (OWN_SAMPLES if data == "self" else SAMPLES).get(kind)


@final
@dataclass(frozen=True)
class LearnedMatching:
    """Options of learned matching: `LearnedMatching(data=make_task("image", "digits:train", [a, b]))`.

    `data` is a task whose inputs are learned on; None lets language models write their own text, and draws pictures for
    models of images. `target` is what the middle should answer: what its
    parents say together, or the labels. `start` finds where learning starts (None: from weights, and from activations where there is data), or is an
    alignment, or "identity". `epochs`, if given, says how many times all is learned from, instead of `steps`. `spaces` may name what moves (residual, heads, ff, classifier, or single spaces); without `permutations` units, heads and a permuted
    stream stay as the start found them; `flips` is the largest share of places that may flip at a time. `patience` is how many looks (20 a run) may
    pass without a better one. `sampler` says where between two models to learn, `concentration` where among many.
    """

    data: Task | None = field(default=None, repr=False)
    start: Matching | Alignment | Literal["identity"] | None = None
    steps: int = 300
    epochs: float | None = None
    lr: float = 3e-3
    batch_size: int | None = None
    accumulate: int = 1
    sampler: str = "narrow"
    concentration: float = DIRICHLET
    target: Target = "parents"
    spaces: tuple[str, ...] | None = None
    permutations: bool = True
    flips: float = 0.05
    held_out: float = 0.1
    patience: int = 10
    seed: int = 0
    device: str = "cpu"
    method: ClassVar[str] = "learned"

    def __post_init__(self) -> None:
        Sampler(self.sampler)
        Shares(self.concentration)
        wrong = {
            "steps": self.steps < 1,
            "lr": not self.lr > 0,
            "batch_size": self.batch_size is not None and self.batch_size < 1,
            "accumulate": self.accumulate < 1,
        }
        wrong |= {
            "epochs": self.epochs is not None and not self.epochs > 0,
            "held_out": not 0 < self.held_out < 1,
            "patience": self.patience < 1,
        }
        for name, bad in wrong.items():
            if bad:
                raise MismatchError(
                    f"{name} {getattr(self, name)}: give a number above 0{' and below 1' if name == 'held_out' else ''}"
                )
        if self.target not in get_args(Target):
            raise MismatchError(f"target {self.target}: there are {', '.join(get_args(Target))}")
        if self.data and self.target == "labels":
            self.data.check_labels()

    def record(self) -> dict[str, Any]:
        """The options, for solution.json."""
        start = self.first_solver()
        plain = {
            name: value
            for name, value in asdict(replace(self, data=None, start=None)).items()
            if name not in ("data", "start")
        }
        return {
            **plain,
            "data": self.data.to_record().to_json() if self.data else "self",
            "start": start.record()
            if isinstance(start, Matching)
            else "identity"
            if start == "identity"
            else "given",
        }

    def first_solver(self) -> Matching | Alignment | Literal["identity"]:
        return (
            self.first(self.data, seed=self.seed, device=self.device)
            if self.start is None
            else self.start
        )

    @staticmethod
    def first(data: Task | None, **options: Any) -> Matching:
        """Where learning starts if nothing else is said: what was made for the parents is no data, and weight matching lets them write for itself."""
        return (
            WeightMatching(**options)
            if data is None or data.data == "self"
            else LearnedMatching.activations(data, **options)
        )

    @staticmethod
    def activations(data: Task | None, **options: Any) -> ActivationMatching:
        """A start by what flows through both models on some of the data."""
        return ActivationMatching(
            data=data and subsample(data, FIRST_SAMPLES[data.name]), **options
        )

    def chosen(self, table: Spec) -> list[str]:
        """The spaces that may move."""
        if self.spaces is None:
            return list(table.hidden)
        wanted = {space for name in self.spaces for space in PARTS.get(name, (name,))}
        found = [name for name in table.hidden if {name, name.partition(".")[0]} & wanted]
        for name in self.spaces:
            if not any(
                {space, space.partition(".")[0]} & {*PARTS.get(name, (name,))}
                for space in table.hidden
            ):
                there = {
                    part
                    for part, spaces in PARTS.items()
                    if any(space.partition(".")[0] in spaces for space in table.hidden)
                }
                raise MismatchError(
                    f"nothing of this model is called '{name}': there are {', '.join(sorted(there))}, and the spaces {listing(table.hidden)}"
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
        progress = progress or _silent
        began = time.perf_counter()
        check_same_table([a, b], "aligned")
        spaces = self.chosen(a.spec)
        if self.data is None and task_of(a) not in SELF_SOURCES:
            raise MismatchError(
                f"{a.where} has no inputs without data (it is a classifier of texts): give data to learn from"
            )
        if self.data is None and self.target == "labels" and task_of(a) not in SELF_LABELLED:
            raise DataError(UNLABELLED)
        entry = decided_by_first(resume_file.read) if resume_file else None
        entry = entry if entry and "learned" in entry.record else None
        if rank_and_world_size()[
            0
        ]:  # of several processes the first one speaks and keeps the journal
            progress, resume_file = _silent, None
        found = (
            _taken_up(a.spec, entry) if entry else self.first_solution(a, b, progress, resume_file)
        )
        if found.interrupted:
            return found
        first = {
            "weighting": asdict(found.weighting) if found.weighting else None,
            "trials": [trial.to_json() for trial in found.trials],
        }
        interrupted, failed, learner = False, False, None
        try:
            learner = self._learner(a, b, found.alignment, spaces, progress)
            learner.first = first
            if entry:
                learner.restore(entry)
            learner.run(progress, resume_file)
        except KeyboardInterrupt:
            if learner is None:  # while the parents wrote: the start stands
                return replace(found, interrupted=True)
            interrupted = True
            learner.tally.stopped = "interrupted"
        except Interrupted as reason:
            failed = True
            progress(str(reason))
        assert learner
        return replace(
            found,
            alignment=learner.best,
            objective=tuple(learner.losses),
            by_space={},
            converged=not interrupted and not failed,
            seconds=time.perf_counter() - began,
            options=self.record(),
            scored_on="held-out inputs",
            learned=learner.tally.record(),
            interrupted=interrupted,
            distance=math.nan,
            correlations=None,
            relaxed=None,
        )

    def first_solution(
        self, a: Model, b: Model, progress: Progress, resume_file: ResumeFile | None
    ) -> Solution:
        start = self.first_solver()
        if not isinstance(start, Matching):
            found = (
                Alignment.identity(a.spec)
                if start == "identity"
                else Alignment(a.spec, start.elements)
            )
            found.check()
            return Solution(alignment=found, converged=True)
        return decided_by_first(
            lambda: start.solve(a, b, progress=progress, resume_file=resume_file)
        )

    def lessons(self, models: Sequence[Model], progress: Progress) -> tuple[Lessons, Lessons]:
        """What is learned from, and what is judged by."""
        device = device_of(local_device(self.device))
        task = self.data
        if task is None:
            kind = task_of(models[0])
            progress(f"no data to learn from: {SELF_SOURCES[kind]}")
            task = make_task(
                kind,
                "self",
                models,
                max_samples=most_inputs(kind, "self"),
                seed=self.seed,
                device=str(device),
            )
        check_same_tokenizers(models)
        learned, held = shuffled(
            task, self.batch_size or usual_batch_size(task), self.seed, self.held_out
        )
        parents = (
            [full_module(model, torch.float32).to(device) for model in models]
            if self.target == "parents"
            else []
        )
        return Lessons(learned, parents, self.target, device), Lessons(
            held, parents, self.target, device
        )

    def refine(
        self, models: Sequence[Model], found: Universe, progress: Progress | None = None
    ) -> Universe:
        """All members' elements together, from where universe matching left them. Preconditions: canonical; the models are the universe's members."""
        progress = progress or _silent
        *others, reference = sorted(found.members, key=lambda number: number == found.reference)
        at = dict(zip(found.members, models, strict=True))
        lessons, judged = self.lessons(models, progress)
        starts = [found.alignments[number] for number in others]
        given = self._with_steps(lessons), at[reference], [at[number] for number in others], starts
        joint = Joint(
            *given, lessons, judged, self.chosen(models[0].spec), Shares(self.concentration)
        )
        interrupted = False
        try:
            joint.run(progress)
        except KeyboardInterrupt:
            interrupted, joint.tally.stopped = True, "interrupted"
        except Interrupted as reason:
            progress(str(reason))
        learned = dict(zip(others, joint.best, strict=True))
        alignments = tuple(
            learned.get(number, alignment) for number, alignment in enumerate(found.alignments)
        )
        settings = {
            **found.settings,
            **self.record(),
            "learned": joint.tally.record(),
            "losses": list(joint.losses),
        }
        return replace(found, alignments=alignments, interrupted=interrupted, settings=settings)

    def _learner(
        self, a: Model, b: Model, start: Alignment, spaces: list[str], progress: Progress
    ) -> Learner:
        lessons, judged = self.lessons([a, b], progress)
        return Learner(self._with_steps(lessons), a, b, start, lessons, judged, spaces)

    def _with_steps(self, lessons: Lessons) -> LearnedMatching:
        return (
            self
            if self.epochs is None
            else replace(
                self,
                steps=max(
                    1,
                    round(
                        self.epochs * len(lessons) / (self.accumulate * rank_and_world_size()[1])
                    ),
                ),
            )
        )


def _taken_up(table: Spec, entry: ResumeEntry) -> Solution:
    """What is known of the start of a run that was interrupted."""
    first = entry.record["start"]
    weighting = first["weighting"]
    return Solution(
        alignment=Alignment(table, entry.elements["best"]),
        weighting=Weighting(**weighting) if weighting else None,
        trials=tuple(map(Trial.from_json, first["trials"])),
    )


def _silent(line: str) -> None:
    """Who does not want to hear."""
