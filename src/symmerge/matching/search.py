"""The search that every matching shares: weightings and starts are tried, scored where there is something to score on, and the best is kept."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from symmerge.errors import MismatchError
from symmerge.matching.base import Solution
from symmerge.matching.evidence import Evidence, Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.resume import Elements, ResumeEntry, ResumeFile
from symmerge.matching.sweeps import Sweeps
from symmerge.models.alignment import Alignment, apply
from symmerge.models.interpolation import interpolate
from symmerge.models.model import Model, Progress
from symmerge.models.tables import check_same_table
from symmerge.observation.correlations import Correlations, measure_correlations
from symmerge.observation.probe import Probe
from symmerge.observation.statistics import Statistics
from symmerge.verification.modules import full_module

WeightingGrid = Mapping[str, tuple[Any, ...]]
START = Weighting(
    norm=0.5, frequency=0.75, stream=1.0, heads=1.0, units=1.0
)  # where something flows through both models
LARGE = 50_000_000  # parameters: beyond, one try takes as long as all others do below


@dataclass(frozen=True)
class Matching(ABC):
    """What the ways to match have in common.

    `weighting` is where the search starts (by default the method's own), `tries` how many weightings may be tried, `starts` how many first
    estimates of the stream where its embeddings do not determine it. `token_counts` replaces frequencies guessed from text, and leaves out
    tokens that never occurred. `share` is how much of B is in the merge that a try is scored by.
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
        """What flows through both models, and what a merge can be scored on; None where the weights are all there is."""

    def probe_of_many(self, models: Sequence[Model], text: Tensor | None = None) -> Probe | None:
        """What a merge of many can be scored on, and what flows through the last of them and through the others; None where there is nothing.
        `text` is what they wrote before."""
        return None

    @property
    @abstractmethod
    def grid(self) -> WeightingGrid:
        """What the search tries from its start, one field of the weighting after the other."""

    def start(self, probe: Probe | None) -> Weighting:
        """Where the search starts."""
        return START if probe else Weighting()

    def most_tries(self, a: Model) -> int:
        """How many weightings may be tried for a model of this size."""
        return self.tries or (1 if a.parameters > LARGE else 100)

    def solve(
        self,
        a: Model,
        b: Model,
        *,
        probe: Probe | None = None,
        progress: Progress | None = None,
        resume_file: ResumeFile | None = None,
    ) -> Solution:
        """Align `b` to `a`. Preconditions: both canonical, and of the same table. `probe` stands for one that would be made of both. Ctrl-C returns the best so far."""
        check_same_table([a, b], "aligned")
        size = a.spec.sizes.get("vocabulary")
        if self.token_counts is not None and len(self.token_counts) != size:
            raise MismatchError(
                f"{len(self.token_counts)} token counts, but {a.where} has {size or 'no'} tokens: give one count per token"
            )
        began = time.perf_counter()
        search = _Search(self, a, b, probe, progress or (lambda line: None), resume_file)
        interrupted = False
        try:
            search.run()
        except KeyboardInterrupt:
            interrupted = True
        best = search.best or search.running
        if best is None:
            raise KeyboardInterrupt  # before anything was found
        return Solution(
            best.alignment,
            tuple(best.objective),
            best.by_space,
            tuple(best.changes),
            best.converged and not interrupted,
            time.perf_counter() - began,
            self.record() | {"chosen": asdict(best.weighting), "scored_on": search.scored_on},
            tuple(search.tried),
            interrupted,
            best.distance,
            search.correlations(best.alignment),
        )

    def record(self) -> dict[str, Any]:
        """The options, for solution.json."""
        counts = None if self.token_counts is None else int((self.token_counts > 0).sum())
        plain = {name: value for name, value in self._options().items() if name != "token_counts"}
        return plain | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokens_that_occur": counts,
        }

    def _options(self) -> dict[str, Any]:
        return asdict(replace(self, token_counts=None))


@dataclass(frozen=True)
class _Try:
    """One weighting from one start: what it found."""

    weighting: Weighting
    score: float
    alignment: Alignment
    objective: list[float]
    changes: list[int]
    converged: bool
    by_space: Mapping[str, float]
    distance: float


class _Search:
    """Try weightings and starts, keep the best, and write down each step so that it can be taken up again."""

    def __init__(
        self,
        options: Matching,
        a: Model,
        b: Model,
        probe: Probe | None,
        progress: Progress,
        resume_file: ResumeFile | None,
    ) -> None:
        self.options, self.a, self.b, self.probe, self.progress, self.resume_file = (
            options,
            a,
            b,
            probe,
            progress,
            resume_file,
        )
        self.best: _Try | None = None
        self.running: _Try | None = None
        self.tried: list[dict[str, Any]] = []
        entry = resume_file.read() if resume_file else None
        self._old = entry or ResumeEntry({"tried": []}, {})

    def run(self) -> None:
        self.probe = self.probe or self.options.probe(self.a, self.b, self.progress)
        for weighting, start in self._candidates():
            self._attempt(weighting, start)

    @property
    def scored_on(self) -> str:
        """By what the best was chosen."""
        return self.probe.about if self.probe and len(self.tried) > 1 else "the objective"

    def correlations(self, alignment: Alignment) -> Correlations | None:
        """For correlations.json, where statistics were gathered."""
        seen = self.probe.observation if self.probe else None
        return measure_correlations(seen, alignment) if isinstance(seen, Statistics) else None

    def _candidates(self) -> Iterator[tuple[Weighting, int]]:
        """Weightings around the best so far where they can be scored, else several starts of one weighting."""
        first = self.options.weighting or self.options.start(self.probe)
        determined = self._evidence(first).determined
        if first.all_layers is None:
            first = replace(first, all_layers=not determined)
        yield first, 0
        if not (self.probe and self.probe.scored):
            yield from (
                (first, start) for start in range(1, 1 if determined else self.options.starts)
            )
            return
        seen = {first}
        for name, values in self.options.grid.items():
            for value in (
                values if self.probe.frequencies is not None or name != "frequency" else ()
            ):
                assert self.best
                candidate = replace(self.best.weighting, **{name: value})
                if candidate not in seen and len(seen) < self.options.most_tries(self.a):
                    seen.add(candidate)
                    yield candidate, 0

    def _attempt(self, weighting: Weighting, start: int) -> None:
        key = {"weighting": asdict(weighting), "start": start}
        known = next((record for record in self._old.record["tried"] if record["key"] == key), None)
        found = self._recall(weighting, known) if known else self._solve(weighting, start, key)
        self.tried.append(
            {
                "key": key,
                "score": found.score,
                "objective": found.objective,
                "changes": found.changes,
                "converged": found.converged,
                "by_space": dict(found.by_space),
                "distance": found.distance,
            }
        )
        better = self.best is None or found.score < self.best.score
        self.best = found if better else self.best
        shown = describe_weighting(asdict(weighting))
        self.progress(
            f"try {len(self.tried)} ({shown}): score {found.score:.4f}{', the best so far' if better and len(self.tried) > 1 else ''}"
        )
        self.running = None
        self._write()

    def _recall(self, weighting: Weighting, known: Mapping[str, Any]) -> _Try:
        """From the journal; only the best try's elements were kept, and no other's are needed."""
        kept = self._old.elements.get("best", {})
        alignment = Alignment(self.a.spec, kept)
        return _Try(
            weighting,
            known["score"],
            alignment,
            known["objective"],
            known["changes"],
            known["converged"],
            known["by_space"],
            known["distance"],
        )

    def _solve(self, weighting: Weighting, start: int, key: Mapping[str, Any]) -> _Try:
        options = self.options
        thin = torch.Generator().manual_seed(options.seed + start) if start else None
        evidence = self._evidence(weighting)
        sweeps = Sweeps(evidence, heads=options.heads, thin=thin)
        if (old := self._old.record.get("running")) and old["key"] == key:
            sweeps.restore(self._old.elements.get("running", {}), old["objective"], old["changes"])
        try:
            while len(sweeps.objective) < options.max_sweeps and not sweeps.settled(
                options.tolerance
            ):
                sweeps.sweep()
                self.progress(
                    f"sweep {len(sweeps.objective)}: objective {sweeps.objective[-1]:.4f}, {sweeps.changes[-1]} spaces changed"
                )
                if sweeps.all_layers:
                    self._write(
                        running={
                            "key": key,
                            "objective": sweeps.objective,
                            "changes": sweeps.changes,
                        },
                        elements=sweeps.elements,
                    )
        except KeyboardInterrupt:
            self.running = _Try(
                weighting,
                float("inf"),
                sweeps.alignment,
                sweeps.objective,
                sweeps.changes,
                False,
                {},
                sweeps.distance,
            )
            raise
        settled = sweeps.settled(options.tolerance)
        alignment = sweeps.alignment
        score = (
            self._score(alignment)
            if self.probe and self.probe.scored and options.most_tries(self.a) > 1
            else sweeps.objective[-1]
        )
        return _Try(
            weighting,
            score,
            alignment,
            sweeps.objective,
            sweeps.changes,
            settled,
            sweeps.by_space(),
            sweeps.distance,
        )

    def _evidence(self, weighting: Weighting) -> Evidence:
        counts = self.options.token_counts
        frequencies = (
            counts if counts is not None else self.probe.frequencies if self.probe else None
        )
        seen = self.probe.observation.activations(weighting.score) if self.probe else ()
        weights = self.a.weights, self.b.weights
        return Evidence(
            self.a.spec,
            weights,
            weighting,
            seen,
            frequencies,
            counts is not None,
            self.options.device,
            self.options.dtype,
        )

    def _score(self, alignment: Alignment) -> float:
        assert self.probe
        middle = interpolate(self.a, apply(alignment, self.b), self.options.share)
        return self.probe.score(full_module(middle, torch.float32).to(self.options.device))

    def _write(
        self, running: Mapping[str, Any] | None = None, elements: Elements | None = None
    ) -> None:
        if self.resume_file is None:
            return
        found = {"best": self.best.alignment.elements} if self.best else {}
        self.resume_file.write(
            ResumeEntry(
                {"tried": self.tried, "running": running},
                found | ({"running": elements} if elements else {}),
            )
        )


def describe_weighting(weighting: Mapping[str, Any]) -> str:
    """A weighting in one line."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in weighting.items()
    )
