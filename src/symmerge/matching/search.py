"""Search shared by weight and activation matching: try weightings and starts, keep the best."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from symmerge.errors import MismatchError
from symmerge.matching.base import Solution, Trial
from symmerge.matching.candidates import Candidate, candidate_of
from symmerge.matching.device_tensors import Tensors, placed, to_solver
from symmerge.matching.evidence import BY_FREQUENCY, MIXED, CachedSamples, Evidence, Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.resume import ResumeEntry, ResumeFile
from symmerge.matching.sweeps import Sweeps
from symmerge.models.alignment import Alignment, apply
from symmerge.models.interpolation import interpolate
from symmerge.models.model import Model
from symmerge.models.progress import Phase, Progress, reporter
from symmerge.models.tables import check_same_table
from symmerge.observation.activations import Activations, Score
from symmerge.observation.correlations import Correlations, measure_correlations
from symmerge.observation.probe import Probe
from symmerge.observation.statistics import Statistics
from symmerge.symmetry.threads import same_bytes
from symmerge.verification.modules import full_module

WeightingGrid = Mapping[str, tuple[float | str, ...]]  # values to try for fields of a weighting

LARGE = 50_000_000  # parameters: above, one trial takes as long as a whole search below
TRIES = 100


@dataclass(frozen=True, kw_only=True)
class Matching(ABC):
    """Options of weight and activation matching.

    | option | meaning |
    |---|---|
    | `weighting` | where the search starts; None: the method's default |
    | `tries` | how many weightings to try at most; None: 100, or 1 for large models |
    | `starts` | first estimates of the stream, where the embeddings do not determine it |
    | `max_sweeps`, `tolerance` | when the sweeps of one trial end |
    | `share` | the share of B in the merge that scores a trial |
    | `heads` | how attention heads are compared |
    | `token_counts` | how often each token occurs; tokens that never do are left out |
    """

    weighting: Weighting | None = None
    tries: int | None = None
    starts: int = 1
    max_sweeps: int = 20
    tolerance: float = 1e-4
    share: float = 0.5
    heads: HeadOptions = field(default_factory=HeadOptions)
    token_counts: Tensor | None = field(default=None, compare=False, repr=False)
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    method: ClassVar[str]

    @abstractmethod
    def probe(self, a: Model, b: Model, progress: Progress) -> Probe | None:
        """Inputs with the activations of both models, to score merges on; None: weights alone."""

    def probe_of_many(self, models: Sequence[Model], text: Tensor | None = None) -> Probe | None:
        """As `probe`, for the last model against the mean of the others. `text` saves sampling."""
        return None

    def frequencies(self, a: Model, b: Model) -> Tensor | None:
        """Expected frequencies of tokens where there is no probe; None: unknown."""
        return None

    @property
    @abstractmethod
    def grid(self) -> WeightingGrid:
        """The values to try around the best weighting so far."""

    def start(self, probe: Probe | None) -> Weighting:
        """The weighting that the search starts from."""
        return MIXED if probe else Weighting()

    def most_tries(self, a: Model) -> int:
        """How many weightings may be tried for a model of this size."""
        return self.tries or (1 if a.parameters > LARGE else TRIES)

    @torch.no_grad()  # products are cut into tiles only without gradients
    @same_bytes()
    def solve(
        self,
        a: Model,
        b: Model,
        *,
        probe: Probe | None = None,
        progress: Progress | None = None,
        resume_file: ResumeFile | None = None,
    ) -> Solution:
        """Align `b` to `a`. Preconditions: both canonical, and of the same table.

        Without `probe` one is made of both models. Ctrl-C returns the best so far.
        """
        self._check(a, b)
        began = time.perf_counter()
        search = _Search(self, a, b, probe, reporter(progress), resume_file)
        try:
            search.run()
        except KeyboardInterrupt:
            search.interrupted = True
        if search.best is None and search.running is None:
            raise KeyboardInterrupt  # before anything was found
        return search.solution(time.perf_counter() - began)

    def record(self) -> dict[str, object]:
        """The options as JSON, for solution.json."""
        counts = None if self.token_counts is None else int((self.token_counts > 0).sum())
        options = {name: value for name, value in self._options().items() if name != "token_counts"}
        return options | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokens_that_occur": counts,
        }

    def _options(self) -> dict[str, object]:
        return asdict(replace(self, token_counts=None))

    def _check(self, a: Model, b: Model) -> None:
        check_same_table([a, b], "aligned")
        size = a.spec.sizes.get("vocabulary")
        if self.token_counts is not None and len(self.token_counts) != size:
            raise MismatchError(
                f"{len(self.token_counts)} token counts, but {a.where} has {size or 'no'} tokens:"
                " give one count per token"
            )


class _Search:
    """Try weightings and starts, keep the best, and store every step for `--resume`."""

    def __init__(
        self,
        options: Matching,
        a: Model,
        b: Model,
        probe: Probe | None,
        progress: Progress,
        resume_file: ResumeFile | None,
    ) -> None:
        self.options, self.a, self.b, self.probe = options, a, b, probe
        self.progress, self.resume_file = progress, resume_file
        self.best: Candidate | None = None
        self.running: Candidate | None = None
        self.interrupted = False
        self.trials: list[Trial] = []
        self.frequencies: Tensor | None = None
        self._activations: dict[Score, tuple[Activations, Activations]] = {}
        entry = resume_file.read() if resume_file else None
        self._stored = entry or ResumeEntry({"trials": []}, {})
        self._stored_trials = list(map(Trial.from_json, self._stored.record["trials"]))

    @cached_property
    def _weights(self) -> tuple[Tensors, Tensors]:
        """Both models' tensors where this solver computes; copied to a GPU only once."""
        options = self.options
        return to_solver((self.a.weights, self.b.weights), options.device, options.dtype)

    def run(self) -> None:
        self.probe = self.probe or self.options.probe(self.a, self.b, self.progress)
        self.progress(Phase(f"matching {self.options.method}"))
        probe, options = self.probe, self.options
        self.frequencies = probe.frequencies if probe else options.frequencies(*self._placed())
        for weighting, start in self._weightings():
            self._attempt(weighting, start)

    def _placed(self) -> tuple[Model, Model]:
        """Both models; where this solver copies tensors to a GPU, they are not read again."""
        if torch.device(self.options.device).type == "cpu":
            return self.a, self.b
        a, b = self._weights
        return placed(self.a, a), placed(self.b, b)

    def solution(self, seconds: float) -> Solution:
        """The best candidate with all evidence. Precondition: there is one."""
        best = self.best or self.running
        assert best
        trial, compared = best.trial, len(self.trials) > 1
        return Solution(
            alignment=best.alignment,
            objective=trial.objective,
            by_space=trial.by_space,
            changes=trial.changes,
            converged=trial.converged and not self.interrupted,
            interrupted=self.interrupted,
            seconds=seconds,
            distance=trial.distance,
            options=self.options.record(),
            weighting=trial.weighting,
            scored_on=self.probe.about if self.probe and compared else "the objective",
            trials=tuple(self.trials),
            correlations=self._correlations(best.alignment),
        )

    def _correlations(self, alignment: Alignment) -> Correlations | None:
        """For correlations.json, where statistics were gathered."""
        observation = self.probe.observation if self.probe else None
        if not isinstance(observation, Statistics):
            return None
        return measure_correlations(observation, alignment)

    def _weightings(self) -> Iterator[tuple[Weighting, int]]:
        """Weightings around the best so far if they can be scored, else starts of one weighting."""
        by_frequency = self.frequencies is not None and not self.probe
        start = BY_FREQUENCY if by_frequency else self.options.start(self.probe)
        first = self.options.weighting or start
        determined = self._evidence(first).determined
        if first.all_layers is None:
            first = replace(first, all_layers=not determined)
        yield first, 0
        if self.probe and self.probe.scored:
            yield from ((weighting, 0) for weighting in self._neighbours(first))
        elif not determined:
            yield from ((first, start) for start in range(1, self.options.starts))

    def _neighbours(self, first: Weighting) -> Iterator[Weighting]:
        """One field after the other, each changed from the best weighting so far."""
        known = {first}
        for name, values in self.options.grid.items():
            if name == "frequency" and self.probe and self.probe.frequencies is None:
                continue
            for value in values:
                assert self.best
                weighting = replace(self.best.trial.weighting, **{name: value})
                if weighting not in known and len(known) < self.options.most_tries(self.a):
                    known.add(weighting)
                    yield weighting

    def _attempt(self, weighting: Weighting, start: int) -> None:
        recalled = self._recall(weighting, start)
        candidate = recalled or self._solve(weighting, start)
        trial = candidate.trial
        better = self.best is None or trial.score < self.best.trial.score
        self.best = candidate if better else self.best
        self.trials.append(trial)
        number = len(self.trials)
        best = ", the best so far" if better and number > 1 else ""
        self.progress(f"try {number} ({weighting}): score {trial.score:.4f}{best}")
        self.running = None
        if not recalled:  # a recalled one may not be the best, whose elements are stored
            self._store(None)

    def _recall(self, weighting: Weighting, start: int) -> Candidate | None:
        """A stored trial. Only the best one's elements were stored; no other's are needed."""
        for trial in self._stored_trials:
            if (trial.weighting, trial.start) == (weighting, start):
                elements = self._stored.elements.get("best", {})
                return Candidate(trial, Alignment(self.a.spec, elements))
        return None

    def _solve(self, weighting: Weighting, start: int) -> Candidate:
        sweeps = self._sweeps(weighting, start)
        try:
            self._sweep(sweeps, start)
        except KeyboardInterrupt:
            self.running = candidate_of(sweeps, start, score=inf, converged=False, by_space={})
            raise
        return candidate_of(
            sweeps,
            start,
            score=self._score(sweeps),
            converged=sweeps.settled(self.options.tolerance),
            by_space=sweeps.by_space(),
        )

    def _sweeps(self, weighting: Weighting, start: int) -> Sweeps:
        """Sweeps at their beginning, or where a stored trial was interrupted."""
        seed = self.options.seed + start
        subsample = torch.Generator().manual_seed(seed) if start else None
        sweeps = Sweeps(self._evidence(weighting), heads=self.options.heads, subsample=subsample)
        running = self._stored.record.get("running")
        if running and (running["weighting"], running["start"]) == (weighting.to_json(), start):
            elements = self._stored.elements.get("running", {})
            sweeps.restore(elements, running["objective"], running["changes"])
        return sweeps

    def _sweep(self, sweeps: Sweeps, start: int) -> None:
        options = self.options
        while len(sweeps.objective) < options.max_sweeps and not sweeps.settled(options.tolerance):
            sweeps.sweep()
            self.progress(
                f"sweep {len(sweeps.objective)}: objective {sweeps.objective[-1]:.4f},"
                f" {sweeps.changes[-1]} spaces changed"
            )
            if sweeps.all_layers:
                self._store(sweeps, start)

    def _score(self, sweeps: Sweeps) -> float:
        """The merge's score on the probe, or the objective if there is nothing to score."""
        if not (self.probe and self.probe.scored and self.options.most_tries(self.a) > 1):
            return sweeps.objective[-1]
        merge = interpolate(self.a, apply(sweeps.alignment, self.b), self.options.share)
        return self.probe.score(full_module(merge, torch.float32).to(self.options.device))

    def _evidence(self, weighting: Weighting) -> Evidence:
        probe, counts = self.probe, self.options.token_counts
        return Evidence(
            table=self.a.spec,
            weights=self._weights,
            weighting=weighting,
            activations=self._activations_for(probe, weighting.score) if probe else (),
            frequencies=self.frequencies if counts is None else counts,
            ignore_unseen=counts is not None,
            device=self.options.device,
            dtype=self.options.dtype,
        )

    def _activations_for(self, probe: Probe, score: Score) -> tuple[Activations, Activations]:
        """Both models' activations; those of the last score are cached."""
        if score not in self._activations:
            (a, b), at = probe.observation.activations(score), self.options
            a, b = (CachedSamples.of(each, at.device, at.dtype) for each in (a, b))
            self._activations = {score: (a, b)}
        return self._activations[score]

    def _store(self, sweeps: Sweeps | None, start: int = 0) -> None:
        """All trials, and the elements of the best and of the running one."""
        if self.resume_file is None:
            return
        record: dict[str, object] = {"trials": [trial.to_json() for trial in self.trials]}
        elements = {"best": self.best.alignment.elements} if self.best else {}
        if sweeps:
            elements["running"] = sweeps.elements
            record["running"] = {
                "weighting": sweeps.evidence.weighting.to_json(),
                "start": start,
                "objective": sweeps.objective,
                "changes": sweeps.changes,
            }
        self.resume_file.write(ResumeEntry(record, elements))
