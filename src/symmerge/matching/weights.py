"""Weight matching: align B to A without data.

Two findings shape it (docs/log.md has the figures):

- Tensors that meet only the stream (embeddings, unembedding, class head) are certain evidence.
  Where they determine the stream, nothing else is used: heads and units may be matched wrongly.
- No weighting of the evidence is best everywhere. Text sampled from language models provides
  token frequencies and activations; several weightings are tried and scored on it. Still no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from symmerge.matching.search import Matching, WeightingGrid
from symmerge.models.model import Model
from symmerge.models.progress import Phase, Progress
from symmerge.observation.probe import Probe, make_probe
from symmerge.observation.unigrams import token_frequencies

GRID: WeightingGrid = {
    "stream": (0.0, 3.0),
    "norm": (1.0, 0.0),
    "units": (0.0, 0.3),
    "heads": (0.0,),
    "frequency": (0.5, 1.0),
}


@final
@dataclass(frozen=True, kw_only=True)
class WeightMatching(Matching):
    """Options of weight matching. The defaults are what we recommend.

    With `generate_text`, text sampled from language models says how much each weight counts.
    Without, `unigrams` still weighs tokens by their frequencies, from chains of single tokens.
    """

    generate_text: bool = True
    unigrams: bool = False
    method: ClassVar[str] = "weights"

    def frequencies(self, a: Model, b: Model) -> Tensor | None:
        if self.generate_text or not self.unigrams or self.token_counts is not None:
            return None
        return token_frequencies([a, b], seed=self.seed, device=self.device)

    def probe(self, a: Model, b: Model, progress: Progress) -> Probe | None:
        if not self.generate_text:
            return None
        progress(Phase("sampling text from both models"))
        scored = self.most_tries(a) > 1
        probe = make_probe([a, b], scored=scored, seed=self.seed, device=self.device)
        if probe is None:
            progress("no self-generated text (not language models, or no memory): weights alone")
        return probe

    def probe_of_many(self, models: Sequence[Model], text: Tensor | None = None) -> Probe | None:
        if not self.generate_text or self.most_tries(models[0]) == 1:
            return None
        return make_probe(models, text=text, seed=self.seed, device=self.device)

    @property
    def grid(self) -> WeightingGrid:
        return GRID
