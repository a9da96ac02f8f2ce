"""Weight matching: align B to A without data.

Two findings shape it (docs/log.md has the figures):

- Tensors that meet only the stream (embeddings, unembedding, class head) are certain evidence: nothing else has to be matched first.
  Where they determine the stream, they alone do; matched heads and units, which may be wrong, only complete it where they do not.
- No one weighting of the evidence is best everywhere. Language models write text, which says how frequent tokens are and what flows through both
  models; several weightings are tried, each from where the best so far was, and scored on that text. Still no data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from symmerge.alignment import Alignment, apply
from symmerge.errors import MismatchError
from symmerge.matching.base import Solution
from symmerge.matching.evidence import Evidence, Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.journal import Elements, Entry, Journal
from symmerge.matching.sweeps import Sweeps
from symmerge.merge import merge
from symmerge.model import Model
from symmerge.probe import Probe, make_probe
from symmerge.verify import full_module

Report = Callable[[str], None]
# Where the search starts with own text, and what it tries from there, one field after the other.
START = Weighting(norm=0.5, frequency=0.75, stream=1.0, heads=1.0, units=1.0)
MOVES: Mapping[str, tuple[float, ...]] = {"stream": (0.0, 3.0), "norm": (1.0, 0.0), "units": (0.0, 0.3), "heads": (0.0,), "frequency": (0.5, 1.0)}
LARGE = 50_000_000  # parameters: beyond, one try takes as long as all others do below


@final
@dataclass(frozen=True)
class WeightMatching:
    """Options of weight matching. The defaults are the method we recommend; `recipes` has the published ones.

    `weighting` is where the search starts (by default it depends on whether there is own text), `tries` how many weightings may be tried, `starts`
    how many first estimates of the stream where its embeddings do not determine it. `token_counts` replaces frequencies guessed from own text, and
    leaves out tokens that never occurred.
    """

    weighting: Weighting | None = None
    own_text: bool = True
    tries: int | None = None
    starts: int = 1
    max_sweeps: int = 20
    tolerance: float = 1e-4
    all_layers: bool | None = None
    heads: HeadOptions = field(default_factory=HeadOptions)
    token_counts: Tensor | None = field(default=None, compare=False, repr=False)
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def solve(self, a: Model, b: Model, *, report: Report | None = None, journal: Journal | None = None) -> Solution:
        """Align `b` to `a`. Preconditions: both canonical, and of the same table. Ctrl-C returns the best so far."""
        if a.spec.fingerprint != b.spec.fingerprint:
            raise MismatchError(f"{a.where} and {b.where} cannot be aligned; they differ in: {'; '.join(a.spec.differences(b.spec))}")
        size = a.spec.sizes.get("vocabulary")
        if self.token_counts is not None and len(self.token_counts) != size:
            raise MismatchError(f"{len(self.token_counts)} token counts, but {a.where} has {size or 'no'} tokens: give one count per token")
        began = time.perf_counter()
        search = _Search(self, a, b, report or (lambda line: None), journal)
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
            self.record() | {"chosen": asdict(best.weighting), "scored_on": "own text" if search.probe and len(search.tried) > 1 else "the objective"},
            tuple(search.tried),
            interrupted,
            best.distance,
        )

    def record(self) -> dict[str, Any]:
        """The options, for solution.json."""
        counts = None if self.token_counts is None else int((self.token_counts > 0).sum())
        plain = {name: value for name, value in asdict(replace(self, token_counts=None)).items() if name != "token_counts"}
        return plain | {"dtype": str(self.dtype).removeprefix("torch."), "tokens_that_occur": counts}


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

    def __init__(self, options: WeightMatching, a: Model, b: Model, report: Report, journal: Journal | None) -> None:
        self.options, self.a, self.b, self.report, self.journal = options, a, b, report, journal
        self.best: _Try | None = None
        self.running: _Try | None = None
        self.tried: list[dict[str, Any]] = []
        self.probe: Probe | None = None
        entry = journal.read() if journal else None
        self._old = entry or Entry({"tried": []}, {})

    def run(self) -> None:
        options = self.options
        if options.own_text:
            self.probe = make_probe([self.a, self.b], scored=self._most_tries() > 1, seed=options.seed, device=options.device)
            self.report("the parents wrote text of their own" if self.probe else "no text of their own (not language models, or too large): weights alone")
        for weighting, start in self._candidates():
            self._attempt(weighting, start)

    def _candidates(self) -> Iterator[tuple[Weighting, int]]:
        """Weightings around the best so far where they can be scored, else several starts of one weighting."""
        first = self.options.weighting or (START if self.probe else Weighting())
        yield first, 0
        if not self.probe:
            determined = self._evidence(first).determined
            yield from ((first, start) for start in range(1, 1 if determined else self.options.starts))
            return
        seen, most = {first}, self._most_tries()
        for name, values in MOVES.items():
            for value in values:
                assert self.best
                candidate = replace(self.best.weighting, **{name: value})
                if candidate not in seen and len(seen) < most:
                    seen.add(candidate)
                    yield candidate, 0

    def _most_tries(self) -> int:
        return self.options.tries or (1 if self.a.parameters > LARGE else 100)

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
        shown = ", ".join(f"{name} {value:g}" for name, value in asdict(weighting).items())
        self.report(f"try {len(self.tried)} ({shown}): score {found.score:.4f}{', the best so far' if better and len(self.tried) > 1 else ''}")
        self.running = None
        self._write()

    def _recall(self, weighting: Weighting, known: Mapping[str, Any]) -> _Try:
        """From the journal; only the best try's elements were kept, and no other's are needed."""
        kept = self._old.elements.get("best", {})
        alignment = Alignment(self.a.spec, kept)
        return _Try(weighting, known["score"], alignment, known["objective"], known["changes"], known["converged"], known["by_space"], known["distance"])

    def _solve(self, weighting: Weighting, start: int, key: Mapping[str, Any]) -> _Try:
        options = self.options
        thin = torch.Generator().manual_seed(options.seed + start) if start else None
        evidence = self._evidence(weighting)
        sweeps = Sweeps(evidence, heads=options.heads, all_layers=options.all_layers, thin=thin)
        if (old := self._old.record.get("running")) and old["key"] == key:
            sweeps.restore(self._old.elements.get("running", {}), old["objective"], old["changes"])
        try:
            while len(sweeps.objective) < options.max_sweeps and not sweeps.settled(options.tolerance):
                sweeps.sweep()
                self.report(f"sweep {len(sweeps.objective)}: objective {sweeps.objective[-1]:.4f}, {sweeps.changes[-1]} spaces changed")
                if sweeps.all_layers:
                    self._write(running={"key": key, "objective": sweeps.objective, "changes": sweeps.changes}, elements=sweeps.elements)
        except KeyboardInterrupt:
            self.running = _Try(weighting, float("inf"), sweeps.alignment, sweeps.objective, sweeps.changes, False, {}, sweeps.distance)
            raise
        settled = sweeps.settled(options.tolerance)
        alignment = sweeps.alignment
        score = self._score(alignment) if self.probe and self._most_tries() > 1 else sweeps.objective[-1]
        return _Try(weighting, score, alignment, sweeps.objective, sweeps.changes, settled, sweeps.by_space(), sweeps.distance)

    def _evidence(self, weighting: Weighting) -> Evidence:
        counts = self.options.token_counts
        frequencies = counts if counts is not None else self.probe.frequencies.cpu() if self.probe else None
        seen = self.probe.activations if self.probe else ()
        weights = self.a.weights, self.b.weights
        return Evidence(self.a.spec, weights, weighting, seen, frequencies, counts is not None, self.options.device, self.options.dtype)

    def _score(self, alignment: Alignment) -> float:
        assert self.probe
        middle = merge(self.a, apply(alignment, self.b))
        return self.probe.score(full_module(middle, torch.float32).to(self.probe.tokens.device))

    def _write(self, running: Mapping[str, Any] | None = None, elements: Elements | None = None) -> None:
        if self.journal is None:
            return
        found = {"best": self.best.alignment.elements} if self.best else {}
        self.journal.write(Entry({"tried": self.tried, "running": running}, found | ({"running": elements} if elements else {})))
