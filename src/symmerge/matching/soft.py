"""Soft matching: doubly stochastic matrices in place of permutations, learned by gradient.

A published relaxation, for comparison. Mixing units and heads can make the midpoint better than
permutations can, but B's end is no longer the function of B. Hardening takes the permutations
nearest to the matrices: an exact symmetry again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from symmerge.checkpoints.memory import freed_memory_kept
from symmerge.distributed import rank_and_world_size
from symmerge.errors import MismatchError
from symmerge.matching.base import Solution
from symmerge.matching.learning.data import load_data
from symmerge.matching.learning.options import LearningOptions
from symmerge.matching.learning.soft_learner import SoftLearner
from symmerge.matching.learning.soft_permutations import SINKHORN, hardened, relax
from symmerge.matching.learning.spaces import choose_spaces
from symmerge.matching.learning.start import first_solution, resumed_start, saver_with_start
from symmerge.matching.optimization.loop import History, Hooks, Loop, evenly
from symmerge.matching.resume import ResumeFile
from symmerge.models.alignment import Alignment
from symmerge.models.label_sets import with_scaled_labels
from symmerge.models.model import Model
from symmerge.models.progress import Phase, Progress, reporter
from symmerge.models.tables import check_same_table
from symmerge.symmetry.groups import Permutation
from symmerge.symmetry.spec import Spec
from symmerge.verification.verdict import verify


@final
@dataclass(frozen=True, kw_only=True)
class SoftMatching(LearningOptions):
    """Options of soft permutations: `SoftMatching(data=make_task("clm", "text.txt", [a, b]))`.

    Spaces that are permuted without signs and scales mix; others keep the elements of the start.
    `noise` is added to all entries at first, relative to fresh weights: with none hardly anything
    is learned, with much the start is lost. For the other options see `LearningOptions`.
    """

    lr: float = 1e-1
    sinkhorn: int = SINKHORN  # normalisations of rows and columns
    noise: float = 1e-2
    method: ClassVar[str] = "soft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinkhorn < 1:
            raise MismatchError(
                f"sinkhorn {self.sinkhorn}: rows and columns must be normalised at least once;"
                f" {SINKHORN} is usual"
            )
        if not 0 <= self.noise < math.inf:
            raise MismatchError(f"noise {self.noise}: give 0 or a small number such as 0.01")

    def chosen_spaces(self, table: Spec) -> list[str]:
        """The spaces that mix."""
        spaces = [
            name
            for name in choose_spaces(table, self.spaces)
            if isinstance(table.spaces[name].group, Permutation) and table.sizes[name] > 1
        ]
        if not spaces:
            raise MismatchError(
                "nothing can mix: none of the chosen spaces is permuted without signs and scales;"
                " choose others with --spaces, or restrict some to permutations"
            )
        return spaces

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
        began = time.perf_counter()
        check_same_table([a, b], "aligned")
        self.chosen_spaces(a.spec)
        entry = resume_file.read() if resume_file else None
        entry = entry if entry and "soft" in entry.record else None
        if rank_and_world_size()[0]:  # processes all do the same: the first one reports and saves
            progress, resume_file = None, None
        progress = reporter(progress)
        if entry:
            start = resumed_start(Alignment(a.spec, entry.elements["start"]), entry.record)
        else:
            start = first_solution(self.start_solver(), a, b, progress, resume_file)
        if start.interrupted:
            return start
        data, mixed = load_data(self, [a, b], progress), with_scaled_labels([a, b])
        learner = SoftLearner(self, mixed[0], mixed[1], start.alignment, data)
        progress(Phase("learning soft permutations"))
        hooks = Hooks(report=progress, saver=saver_with_start(resume_file, start))
        loop = Loop(learner, evenly(self.steps), hooks)
        if entry:
            loop.resume(entry)
        solution = self._hardened(learner, b, start, loop.run_to_best())
        progress(_summary(solution.soft or {}))
        return replace(solution, seconds=time.perf_counter() - began)

    def _hardened(
        self, learner: SoftLearner, b: Model, start: Solution, history: History
    ) -> Solution:
        """The nearest symmetry to what was learned, and the distance to it."""
        relaxed = learner.relaxed()
        solution = replace(
            start,
            alignment=hardened(relaxed, b.spec).compose(start.alignment),
            objective=tuple(history.losses),
            by_space={},
            converged=not history.interrupted,
            interrupted=history.interrupted,
            distance=math.nan,
            correlations=None,
            relaxed=relaxed,
            options=self.record(),
            scored_on="held-out inputs",
        )
        record = learner.record(relaxed, history)
        record["end"]["function"] = verify(b, relax(solution, b)).difference
        return replace(solution, soft=record)


def _summary(record: Mapping[str, Any]) -> str:
    midpoint, end = record["midpoint"], record["end"]
    losses = ", ".join(f"{way} {midpoint[way]:.4f}" for way in ("start", "soft", "hardened"))
    return (
        f"held-out loss at the midpoint: {losses}; the soft end is not B:"
        f" logits differ by {end['function']:.1e}, its loss by {end['loss']:+.4f}"
    )
