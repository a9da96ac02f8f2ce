"""Learned matching: optimise the group elements by gradient, so that models between improve.

Only group elements are learned: both ends stay exactly the parents, and every merge is a stock
checkpoint. The target is the parents' joint prediction, so no labels are needed, and no data
either: language models generate text, and image models get synthetic images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

from symmerge.checkpoints.memory import freed_memory_kept
from symmerge.distributed import decided_by_first, rank_and_world_size
from symmerge.matching.base import Solution, Universe
from symmerge.matching.learning.data import LearningData, check_data, load_data
from symmerge.matching.learning.learner import Learner, joint_learner, pair_learner
from symmerge.matching.learning.options import LearningOptions
from symmerge.matching.learning.samplers import DIRICHLET, Shares
from symmerge.matching.learning.spaces import choose_spaces
from symmerge.matching.learning.start import first_solution, resumed_start, saver_with_start
from symmerge.matching.optimization.loop import Hooks, Loop, Saver
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.models.alignment import Alignment, apply
from symmerge.models.circuit_form import check_circuits, circuit_spaces, separate_heads
from symmerge.models.label_sets import with_scaled_labels
from symmerge.models.model import Model
from symmerge.models.progress import Phase, Progress, reporter
from symmerge.models.tables import check_same_table
from symmerge.symmetry.spec import Spec


@final
@dataclass(frozen=True, kw_only=True)
class LearnedMatching(LearningOptions):
    """Options of learned matching: `LearnedMatching(data=make_task("clm", "text.txt", [a, b]))`.

    Without `permutations`, units, heads and a permuted stream keep the order found by the start.
    With `attention="circuits"` the models between have the mean of the heads' circuits, so bases
    inside heads do not matter: no stock checkpoints, for comparison with published numbers.
    For the other options see `LearningOptions`.
    """

    lr: float = 3e-3
    epochs: float | None = None  # passes over the data, instead of `steps`
    accumulate: int = 1  # batches per step
    concentration: float = DIRICHLET  # of the Dirichlet that weights of many models are drawn from
    permutations: bool = True
    flips: float = 0.05  # the largest share of positions that may flip at a time
    patience: int = 10  # evaluations (20 per run) without improvement
    attention: Literal["factors", "circuits"] = "factors"  # what of a head is averaged
    method: ClassVar[str] = "learned"

    def __post_init__(self) -> None:
        super().__post_init__()
        Shares(self.concentration)
        self._require_positive("accumulate", "epochs", "patience")

    def chosen_spaces(self, table: Spec) -> list[str]:
        """The spaces that may move."""
        return choose_spaces(table, self.spaces)

    def total_steps(self, batches: int) -> int:
        """The number of steps, given the number of batches."""
        if self.epochs is None:
            return self.steps
        per_step = self.accumulate * rank_and_world_size()[1]
        return max(1, round(self.epochs * batches / per_step))

    @freed_memory_kept()
    def solve(
        self,
        a: Model,
        b: Model,
        *,
        progress: Progress | None = None,
        resume_file: ResumeFile | None = None,
    ) -> Solution:
        """Align `b` to `a`; both canonical, with the same table. Ctrl-C returns the best so far."""
        began, progress = time.perf_counter(), reporter(progress)
        check_same_table([a, b], "aligned")
        self.chosen_spaces(a.spec)
        check_data(self, a)
        entry = decided_by_first(resume_file.read) if resume_file else None
        entry = entry if entry and "learned" in entry.record else None
        if self.attention == "circuits":  # states are of doubled heads: not kept
            check_circuits(a)
            entry = resume_file = None
        if rank_and_world_size()[0]:  # the first process reports and saves
            progress, resume_file = reporter(None), None
        if entry:
            start = resumed_start(Alignment(a.spec, entry.elements["best"]), entry.record)
        else:
            start = first_solution(self.start_solver(), a, b, progress, resume_file)
        if start.interrupted:
            return start
        try:
            data = load_data(self, [a, b], progress)
            a, b = with_scaled_labels([a, b])
            learner = self._learner(a, b, start.alignment, data)
        except KeyboardInterrupt:  # while inputs are generated
            return replace(start, interrupted=True)
        loop = _loop(learner, progress, saver_with_start(resume_file, start))
        if entry:
            loop.resume(entry)
        return replace(self._solution(start, loop), seconds=time.perf_counter() - began)

    def _learner(self, a: Model, b: Model, start: Alignment, data: LearningData) -> Learner:
        if self.attention == "factors":
            return pair_learner(self, a, b, start, data)
        still, moving = separate_heads(a, apply(start, b))
        identity, inside = Alignment.identity(still.spec), circuit_spaces(a)
        return pair_learner(self, still.cached(), moving.cached(), identity, data, circuits=inside)

    def _learned(self, start: Alignment, best: Alignment) -> Alignment:
        """The best alignment in the models' own table; bases inside heads as at the start."""
        if self.attention == "factors":
            return best
        own = Alignment.identity(start.spec).elements
        moved = {name: best[name] for name in own.keys() & best.spec.hidden.keys()}
        return Alignment(start.spec, {**own, **moved}).compose(start)

    def _solution(self, start: Solution, loop: Loop[ResumeEntry]) -> Solution:
        history, learner = loop.run_to_best(), loop.subject
        assert isinstance(learner, Learner)
        return replace(
            start,
            alignment=self._learned(start.alignment, learner.objective.members[0].best),
            objective=tuple(history.losses),
            by_space={},
            converged=not history.interrupted and not history.failed,
            options=self.record(),
            scored_on="held-out inputs",
            learned=learner.record(history),
            interrupted=history.interrupted,
            distance=math.nan,
            correlations=None,
            relaxed=None,
        )

    @freed_memory_kept()
    def refine(
        self, models: Sequence[Model], universe: Universe, progress: Progress | None = None
    ) -> Universe:
        """Learn all members together, from where universe matching put them.

        `models` are the universe's members, canonical.
        """
        progress = reporter(progress)
        model_of = dict(zip(universe.members, with_scaled_labels(models), strict=True))
        others = [number for number in universe.members if number != universe.reference]
        data = load_data(self, models, progress)
        learner = joint_learner(
            self,
            model_of[universe.reference],
            [model_of[number] for number in others],
            [universe.alignments[number] for number in others],
            data,
        )
        history = _loop(learner, progress).run_to_best()
        learned = dict(zip(others, learner.objective.members, strict=True))
        alignments = tuple(
            learned[number].best if number in learned else alignment
            for number, alignment in enumerate(universe.alignments)
        )
        counts = {"learned": learner.record(history), "losses": list(history.losses)}
        settings = {**universe.settings, **self.record(), **counts}
        return replace(
            universe, alignments=alignments, interrupted=history.interrupted, settings=settings
        )


def _loop(
    learner: Learner, progress: Progress, saver: Saver[ResumeEntry] | None = None
) -> Loop[ResumeEntry]:
    progress(Phase("learning the symmetry"))
    hooks = Hooks(report=progress, after_step=learner.after_step, saver=saver)
    return Loop(learner, learner.plan, hooks)
