"""Align many models to common coordinates: one element per model, so that every cycle closes.

Each member in turn is matched to the mean of the others, in rounds, while the mean of all
improves: on self-generated text if the solver uses it, else by distance. Activations are taken
from every member, because their mean is a poor model. At most three models are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import MismatchError, SymmergeError
from symmerge.matching.base import Solution, Universe
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.matching.search import Matching
from symmerge.models.alignment import Alignment, apply
from symmerge.models.distances import distance
from symmerge.models.interpolation import interpolate
from symmerge.models.model import Model
from symmerge.models.progress import Phase, Progress, reporter
from symmerge.models.tables import check_same_table
from symmerge.observation.probe import Probe
from symmerge.symmetry.groups.linalg import total
from symmerge.symmetry.threads import same_bytes
from symmerge.verification.modules import full_module

MEDOID = "medoid"
ROUNDS = 10  # at most; two or three are usual
GAIN = 1e-3  # relative decrease of the spread that each round must bring to go on


@runtime_checkable
class PairSolver(Protocol):
    """Any solver for a pair of models."""

    def solve(
        self,
        a: Model,
        b: Model,
        *,
        progress: Progress | None = None,
        resume_file: ResumeFile | None = None,
    ) -> Solution: ...


@same_bytes()
def match_universe(
    models: Sequence[Model],
    solver: PairSolver,
    *,
    reference: int | str = 0,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
    resume_file: ResumeFile | None = None,
) -> Universe:
    """Align all models to one another. Preconditions: canonical, and of one table.

    `reference` is a place among the models, or "medoid" for the one closest to all others. A
    model that fails is left out and named. Ctrl-C returns the best so far.
    """
    if len(models) < 2:
        where = models[0].where if models else "no model"
        raise MismatchError(f"{where}: nothing to align it to; give two or more models")
    check_same_table(models, "aligned")
    run = _Run(list(models), solver, reporter(progress), resume_file)
    try:
        run.begin(reference)
        while run.goes_on(rounds):
            run.round()
    except KeyboardInterrupt:
        if len(run.alignments) < 2:
            raise
        run.interrupted = True
    return run.universe()


class _Run:
    """The alignments so far, and the sum of all aligned members."""

    def __init__(
        self,
        models: list[Model],
        solver: PairSolver,
        progress: Progress,
        resume_file: ResumeFile | None,
    ) -> None:
        self.models, self.solver = models, solver
        self.progress, self.resume_file = progress, resume_file
        self.alignments: dict[int, Alignment] = {}
        self.left_out: dict[int, str] = {}
        self.settings: dict[str, Any] = {}
        self.reference = 0
        self.spreads: list[float] = []
        self.moved: list[int] = []
        self.tried: dict[int, bool] = {}  # in the round that runs: members, whether they moved
        self.total: dict[str, Tensor] = {}
        self.probe: Probe | None = None
        self.interrupted = False

    @property
    def members(self) -> list[int]:
        return sorted(self.alignments)

    def begin(self, reference: int | str) -> None:
        """Align every model to the reference."""
        if entry := self.resume_file.read() if self.resume_file else None:
            self._restore(entry)
        else:
            self.reference = self._medoid() if reference == MEDOID else int(reference)
        self.alignments.setdefault(self.reference, Alignment.identity(self.models[0].spec))
        for number in range(len(self.models)):
            if number not in self.alignments and number not in self.left_out:
                self._align(number)
        if len(self.alignments) < 2:
            reasons = "; ".join(self.left_out.values())
            raise MismatchError(
                f"no model could be aligned to {self.models[self.reference].where}: {reasons}"
            )
        self._sum()
        if not self.spreads:
            self.spreads.append(self._spread())
            self._store()
        if len(self.alignments) > 2 and isinstance(self.solver, Matching):
            self.probe = self.solver.probe_of_many([self.models[number] for number in self.members])

    def goes_on(self, rounds: int) -> bool:
        """Whether there is another round. Depends on what is stored alone, so resuming is exact."""
        if len(self.members) < 3 or len(self.moved) >= rounds:
            return False
        if not self.moved:
            return True
        before, after = self.spreads[-2:]
        return self.moved[-1] > 0 and (self.probe is not None or after < (1 - GAIN) * before)

    def round(self) -> None:
        """Match each member to the mean of the others, the reference last."""
        number = len(self.moved) + 1
        for member in sorted(self.members, key=lambda member: member == self.reference):
            if member in self.tried:
                continue
            where = self.models[member].where
            self.progress(Phase(f"round {number}: matching {where} to the mean of all others"))
            self.tried[member] = self._improve(member)
            self._store()
        self.moved.append(sum(self.tried.values()))
        self.tried = {}
        self.spreads.append(self._spread())
        self._store()
        before, after = self.spreads[-2:]
        moved = f"round {number}: {self.moved[-1]} moved"
        self.progress(f"{moved}; spread {after:.4f}, before {before:.4f}")

    def universe(self) -> Universe:
        """All alignments, relative to the original coordinates of the reference."""
        identity = Alignment.identity(self.models[0].spec)
        back = self.alignments[self.reference].inverse()
        alignments = {
            number: back.compose(alignment)
            for number, alignment in self.alignments.items()
            if number != self.reference
        }
        numbers = range(len(self.models))
        missing = [number for number in numbers if number not in self.alignments]
        return Universe(
            alignments=tuple(alignments.get(number, identity) for number in numbers),
            reference=self.reference,
            spreads=tuple(self.spreads),
            moved=tuple(self.moved),
            left_out=self.left_out
            | {number: "not reached" for number in missing if number not in self.left_out},
            interrupted=self.interrupted,
            settings=self.settings,
        )

    # to the reference

    def _align(self, number: int) -> None:
        """Align a model to the reference; one that fails is left out, and the others go on."""
        a, b = self.models[self.reference].cached(), self.models[number].cached()
        count = f"{len(self.alignments)} of {len(self.models) - 1}"
        self.progress(Phase(f"aligning {b.where} to {a.where}, {count}"))
        try:
            solution = self.solver.solve(a, b, progress=self.progress)
        except SymmergeError as error:
            self.left_out[number] = f"{b.where}: {error}"
            self.progress(f"left out: {self.left_out[number]}")
            return
        self.alignments[number] = solution.alignment
        self.settings.setdefault("first", solution.settings)
        if solution.interrupted:  # not stored: a resumed run solves it to the end
            raise KeyboardInterrupt
        self._store()

    def _medoid(self) -> int:
        """The model closest to all others, pair by pair."""
        distances = torch.zeros(len(self.models), len(self.models))
        for i, j in combinations(range(len(self.models)), 2):
            a, b = self.models[i].cached(), self.models[j].cached()
            self.progress(Phase(f"measuring the distance between {a.where} and {b.where}"))
            solution = self.solver.solve(a, b, progress=self.progress)
            distances[i, j] = distances[j, i] = distance(a, apply(solution.alignment, b))
        chosen = int(distances.sum(0).argmin())
        where = self.models[chosen].where
        self.settings["medoid"] = {"distances": distances.tolist(), "chosen": where}
        self.progress(f"the reference is {where}, the closest to all others")
        return chosen

    # to the mean of all others

    def _improve(self, number: int) -> bool:
        """Match a member to the mean of all others; keep its new place if that is better."""
        member = apply(self.alignments[number], self.models[number]).cached()
        others = self._others(member)
        solution = self._solve(number, others, member)
        if solution.interrupted:
            raise KeyboardInterrupt
        candidate = apply(solution.alignment, member)
        if not self._cost(others, candidate) < self._cost(others, member):
            return False
        self.alignments[number] = solution.alignment.compose(self.alignments[number])
        self._sum()
        return True

    def _solve(self, number: int, others: Model, member: Model) -> Solution:
        """Align a member to the mean of the others; trials are scored by the mean of all."""
        if not isinstance(self.solver, Matching):
            return self.solver.solve(others, member, progress=self.progress)
        solver = replace(self.solver, share=1 / len(self.alignments))
        probe = None
        if self.probe is not None:
            text = torch.cat([batch.inputs["input_ids"] for batch in self.probe.batches])
            rest = [self._aligned(other) for other in self.members if other != number]
            probe = self.solver.probe_of_many([*rest, member], text)
        return solver.solve(others, member, probe=probe, progress=self.progress)

    def _cost(self, others: Model, member: Model) -> float:
        """The cost of the mean of all, this member included."""
        if self.probe is None:
            return distance(others, member)
        device = self.solver.device if isinstance(self.solver, Matching) else "cpu"
        mean = interpolate(others, member, 1 / len(self.alignments))
        return self.probe.score(full_module(mean, torch.float32).to(device))

    # sums

    def _others(self, member: Model) -> Model:
        """The mean of all aligned members but one."""
        count = len(self.alignments) - 1
        computed = {name: partial(_without, self.total, member, name, count) for name in self.total}
        return replace(member, weights=DerivedWeights(member.weights, computed)).cached()

    def _aligned(self, number: int) -> Model:
        return apply(self.alignments[number], self.models[number])

    def _tensors(self, number: int) -> Iterator[tuple[str, Tensor]]:
        weights = self._aligned(number).weights
        return ((name, weights[name]) for name in weights)

    def _sum(self) -> None:
        """The sum of all members, always in this order: a resumed run must round alike."""
        first, *others = self.members
        self.total = {name: tensor.clone() for name, tensor in self._tensors(first)}
        for number in others:
            for name, tensor in self._tensors(number):
                self.total[name] += tensor

    def _spread(self) -> float:
        """Root of the members' squared distance from their mean, over their squared norms."""
        norms = sum(
            total(tensor.double().square()).item()
            for member in self.members
            for _, tensor in self._tensors(member)
        )
        of_sum = sum(total(tensor.double().square()).item() for tensor in self.total.values())
        mean = of_sum / len(self.alignments)
        return (max(0.0, norms - mean) / max(norms, 1e-30)) ** 0.5

    # resuming

    def _store(self) -> None:
        if self.resume_file is None:
            return
        record = {
            "reference": self.reference,
            "left_out": self.left_out,
            "spreads": self.spreads,
            "moved": self.moved,
            "tried": self.tried,
            "settings": self.settings,
        }
        elements = {str(number): one.elements for number, one in self.alignments.items()}
        self.resume_file.write(ResumeEntry(record, elements))

    def _restore(self, entry: ResumeEntry) -> None:
        record, table = entry.record, self.models[0].spec
        self.reference, self.settings = record["reference"], dict(record["settings"])
        self.spreads, self.moved = list(record["spreads"]), list(record["moved"])
        self.tried = {int(number): moved for number, moved in record["tried"].items()}
        self.left_out = {int(number): why for number, why in record["left_out"].items()}
        self.alignments = {
            int(number): Alignment(table, elements) for number, elements in entry.elements.items()
        }


def _without(total: Mapping[str, Tensor], member: Model, name: str, count: int) -> Tensor:
    return (total[name] - member.weights[name].to(total[name])) / count
