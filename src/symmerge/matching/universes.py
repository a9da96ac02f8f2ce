"""Many models in one basin: each has one element that brings it to common coordinates, so going round any circle of them ends where it began.

Every member is matched to the mean of all others, one after the other and again, as long as that makes the mean of all better: on text that all of
them write, where the solver can use such, else by how close they come. What flows through the others is taken from each of them: their mean is a poor
model. At most one model more than the pair that is being matched is in memory, however many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights
from symmerge.errors import MismatchError, SymmergeError
from symmerge.matching.base import Solution
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.matching.search import Matching
from symmerge.models.alignment import Alignment, apply
from symmerge.models.distances import distance
from symmerge.models.interpolation import interpolate
from symmerge.models.model import Model, Progress
from symmerge.models.tables import check_same_table
from symmerge.observation.probe import Probe
from symmerge.verification.modules import full_module

MEDOID = "medoid"
ROUNDS = 10  # at most; two or three are usual
GAIN = 1e-3  # of the spread: rounds go on while they bring this much


@runtime_checkable
class Solver(Protocol):
    """Whatever aligns a pair."""

    def solve(
        self,
        a: Model,
        b: Model,
        *,
        progress: Progress | None = None,
        resume_file: ResumeFile | None = None,
    ) -> Solution: ...


@dataclass(frozen=True)
class Universe:
    """One alignment per member, to the coordinates of the reference, whose own is the identity.

    `spreads` says how far the members lie from their mean after each round, over their own size; `left_out` who failed, and why.
    """

    alignments: tuple[Alignment, ...]
    reference: int
    spreads: tuple[float, ...]
    moved: tuple[int, ...] = ()  # how many members each round moved
    left_out: Mapping[int, str] = field(default_factory=dict)
    interrupted: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def members(self) -> list[int]:
        """Who is in it, by place among the models that were given."""
        return [number for number in range(len(self.alignments)) if number not in self.left_out]

    def between(self, a: int, b: int) -> Alignment:
        """From the coordinates of one member to those of another."""
        return self.alignments[b].inverse().compose(self.alignments[a])


def cycle_error(universe: Universe) -> float:
    """How far the way round any three members is from changing nothing: rounding, because each has one element."""
    members = universe.members
    circles = [(a, b, c) for a in members for b in members for c in members if a < b < c] or [
        (a, b, a) for a, b in combinations(members, 2)
    ]
    return max(
        (
            circle_error([universe.between(a, b), universe.between(b, c), universe.between(c, a)])
            for a, b, c in circles
        ),
        default=0.0,
    )


def circle_error(way: Sequence[Alignment]) -> float:
    """How far alignments one after the other are from the identity, in the largest entry; a place that ends elsewhere counts as 1."""
    total = way[0]
    for step in way[1:]:
        total = step.compose(total)
    still = Alignment.identity(total.spec)
    apart = [
        _apart(part, total[name][part], still[name][part])
        for name in still.elements
        for part in still[name]
    ]
    return max(apart, default=0.0)


def _apart(part: str, found: Tensor, still: Tensor) -> float:
    return (
        float((found != still).any())
        if part == "index"
        else (found - still).abs().max().item()
        if found.numel()
        else 0.0
    )


def match_universe(
    models: Sequence[Model],
    solver: Solver,
    *,
    reference: int | str = 0,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
    resume_file: ResumeFile | None = None,
) -> Universe:
    """Align all to one another. Preconditions: canonical, and of one table. A member that fails is left out and named; Ctrl-C returns what is found so far."""
    _check(models)
    run = _Run(list(models), solver, progress or (lambda line: None), resume_file)
    interrupted = False
    try:
        run.begin(reference)
        for number in range(1, rounds + 1):
            if len(run.members) < 3 or not run.round(number):
                break
    except KeyboardInterrupt:
        if len(run.found) < 2:
            raise
        interrupted = True
    return run.universe(interrupted)


def _check(models: Sequence[Model]) -> None:
    if len(models) < 2:
        raise MismatchError(
            f"{models[0].where if models else 'no model'}: there is nothing to align it to; give two models or more"
        )
    check_same_table(models, "aligned")


class _Run:
    """The state: what was found for whom, and the sum of all members where they lie now."""

    def __init__(
        self,
        models: list[Model],
        solver: Solver,
        progress: Progress,
        resume_file: ResumeFile | None,
    ) -> None:
        self.models, self.solver, self.progress, self.resume_file = (
            models,
            solver,
            progress,
            resume_file,
        )
        self.found: dict[int, Alignment] = {}
        self.left_out: dict[int, str] = {}
        self.settings: dict[str, Any] = {}
        self.reference, self.spreads, self.moved = 0, [], []
        self.total: dict[str, Tensor] = {}
        self.judge: Probe | None = None

    @property
    def members(self) -> list[int]:
        return sorted(self.found)

    def begin(self, reference: int | str) -> None:
        """Everyone to the reference."""
        entry = self.resume_file.read() if self.resume_file else None
        if entry:
            self._take_up(entry)
        else:
            self.reference = self._medoid() if reference == MEDOID else int(reference)
        self.found.setdefault(self.reference, Alignment.identity(self.models[0].spec))
        self.total = {name: tensor.clone() for name, tensor in self._tensors(self.reference)}
        for number in range(len(self.models)):
            if number == self.reference or number in self.left_out:
                continue
            if number not in self.found:
                self._meet(number)
            if number in self.found:
                self._add(number, 1)
        if len(self.found) < 2:
            raise MismatchError(
                f"no model could be aligned to {self.models[self.reference].where}: {'; '.join(self.left_out.values())}"
            )
        if not self.spreads:
            self.spreads.append(self.spread())
            self._write()
        if len(self.found) > 2 and isinstance(self.solver, Matching):
            self.judge = self.solver.probe_of_many([self.models[member] for member in self.members])

    def _meet(self, number: int) -> None:
        a, b = self.models[self.reference].cached(), self.models[number].cached()
        self.progress(f"{b.where} to {a.where}, {len(self.found)} of {len(self.models) - 1}")
        try:
            solution = self.solver.solve(a, b, progress=self.progress)
        except SymmergeError as error:  # the others' work is not lost
            self.left_out[number] = f"{b.where}: {error}"
            self.progress(f"left out: {self.left_out[number]}")
            return
        self.found[number] = solution.alignment
        self.settings.setdefault("first", dict(solution.settings))
        self._write()
        if solution.interrupted:
            raise KeyboardInterrupt

    def _medoid(self) -> int:
        """Who is closest to all others, pair by pair."""
        apart = torch.zeros(len(self.models), len(self.models))
        for i, j in combinations(range(len(self.models)), 2):
            a, b = self.models[i].cached(), self.models[j].cached()
            self.progress(f"medoid: {a.where} and {b.where}")
            found = self.solver.solve(a, b, progress=self.progress)
            apart[i, j] = apart[j, i] = distance(a, apply(found.alignment, b))
        chosen = int(apart.sum(0).argmin())
        self.settings["medoid"] = {"distances": apart.tolist(), "chosen": self.models[chosen].where}
        self.progress(f"the reference is {self.models[chosen].where}, closest to all others")
        return chosen

    def round(self, number: int) -> bool:
        """Everyone to the mean of all others, the reference last. Whether another round may bring more."""
        moved = 0
        for member in sorted(self.members, key=lambda member: member == self.reference):
            self.progress(f"round {number}: {self.models[member].where} to the mean of all others")
            moved += self._improve(member)
        self.moved.append(moved)
        self.spreads.append(self.spread())
        self._write()
        before, after = self.spreads[-2:]
        self.progress(f"round {number}: {moved} moved; spread {after:.4f}, before {before:.4f}")
        return moved > 0 and (self.judge is not None or after < (1 - GAIN) * before)

    def _improve(self, member: int) -> bool:
        """Match a member to the mean of all others anew, from where it lies; kept if it comes closer."""
        now = apply(self.found[member], self.models[member]).cached()
        others = self._others(now)
        solution = self._solved(member, others, now)
        if solution.interrupted:
            raise KeyboardInterrupt
        if not self._worth(others, apply(solution.alignment, now)) < self._worth(others, now):
            return False
        self._add(member, -1)
        self.found[member] = solution.alignment.compose(self.found[member])
        self._add(member, 1)
        self._write()
        return True

    def _solved(self, member: int, others: Model, now: Model) -> Solution:
        """Tries are scored by the mean of all."""
        if not isinstance(self.solver, Matching):
            return self.solver.solve(others, now, progress=self.progress)
        probe = None
        if self.judge is not None:
            intact = [
                apply(self.found[other], self.models[other])
                for other in self.members
                if other != member
            ]
            probe = self.solver.probe_of_many(
                [*intact, now], torch.cat([inputs["input_ids"] for inputs in self.judge.inputs])
            )
        return replace(self.solver, share=1 / len(self.found)).solve(
            others, now, probe=probe, progress=self.progress
        )

    def _worth(self, others: Model, member: Model) -> float:
        """How bad the mean of all is with the member there."""
        if self.judge is None:
            return distance(others, member)
        device = self.solver.device if isinstance(self.solver, Matching) else "cpu"
        return self.judge.score(
            full_module(interpolate(others, member, 1 / len(self.found)), torch.float32).to(device)
        )

    def _others(self, member: Model) -> Model:
        count = len(self.found) - 1
        computed = {name: partial(_without, self.total, member, name, count) for name in self.total}
        return replace(member, weights=DerivedWeights(member.weights, computed)).cached()

    def _tensors(self, number: int):
        weights = apply(self.found[number], self.models[number]).weights
        return ((name, weights[name]) for name in weights)

    def _add(self, number: int, sign: int) -> None:
        for name, tensor in self._tensors(number):
            self.total[name] += sign * tensor

    def spread(self) -> float:
        """The root of the members' squared distance from their mean, over that of their own size."""
        sizes = sum(
            tensor.double().square().sum().item()
            for member in self.members
            for _, tensor in self._tensors(member)
        )
        mean = sum(total.double().square().sum().item() for total in self.total.values()) / len(
            self.found
        )
        return (max(0.0, sizes - mean) / max(sizes, 1e-30)) ** 0.5

    def universe(self, interrupted: bool) -> Universe:
        # The reference may have moved with the others: seen from where it is, it has not.
        still, back = Alignment.identity(self.models[0].spec), self.found[self.reference].inverse()
        found = {
            number: still if number == self.reference else back.compose(alignment)
            for number, alignment in self.found.items()
        }
        left = {
            **self.left_out,
            **{
                number: "not reached"
                for number in range(len(self.models))
                if number not in self.found and number not in self.left_out
            },
        }
        alignments = tuple(found.get(number, still) for number in range(len(self.models)))
        return Universe(
            alignments,
            self.reference,
            tuple(self.spreads),
            tuple(self.moved),
            left,
            interrupted,
            self.settings,
        )

    # taking a run up again

    def _write(self) -> None:
        if self.resume_file is None:
            return
        record = {
            "reference": self.reference,
            "left_out": self.left_out,
            "spreads": self.spreads,
            "moved": self.moved,
            "settings": self.settings,
        }
        self.resume_file.write(
            ResumeEntry(
                record, {str(number): found.elements for number, found in self.found.items()}
            )
        )

    def _take_up(self, entry: ResumeEntry) -> None:
        known, table = entry.record, self.models[0].spec
        self.reference, self.spreads, self.moved, self.settings = (
            known["reference"],
            list(known["spreads"]),
            list(known["moved"]),
            dict(known["settings"]),
        )
        self.left_out = {int(number): why for number, why in known["left_out"].items()}
        self.found = {
            int(number): Alignment(table, elements) for number, elements in entry.elements.items()
        }


def _without(total: Mapping[str, Tensor], member: Model, name: str, count: int) -> Tensor:
    return (total[name] - member.weights[name].to(total[name])) / count
