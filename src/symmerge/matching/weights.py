"""Weight matching: align B to A without data.

Two findings shape it (docs/log.md has the figures):

- Tensors that meet only the stream (embeddings, unembedding, class head) are certain evidence: nothing else has to be matched first.
  Where they determine the stream, they alone do; matched heads and units, which may be wrong, only complete it where they do not.
- No one weighting of the evidence is best everywhere. Language models write text, which says how frequent tokens are and what flows through both
  models; several weightings are tried, each from where the best so far was, and scored on that text. Still no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from symmerge.matching.search import Matching, WeightingGrid
from symmerge.models.model import Model, Progress
from symmerge.observation.probe import Probe, make_probe

GRID: WeightingGrid = {
    "stream": (0.0, 3.0),
    "norm": (1.0, 0.0),
    "units": (0.0, 0.3),
    "heads": (0.0,),
    "frequency": (0.5, 1.0),
}


@final
@dataclass(frozen=True)
class WeightMatching(Matching):
    """Options of weight matching. The defaults are the method we recommend; `recipes` has the published ones.

    With `generate_text`, language models write text that tells how much each weight counts.
    """

    generate_text: bool = True
    method: ClassVar[str] = "weights"

    def probe(self, a: Model, b: Model, progress: Progress) -> Probe | None:
        if not self.generate_text:
            return None
        found = make_probe(
            [a, b], scored=self.most_tries(a) > 1, seed=self.seed, device=self.device
        )
        progress(
            "the parents wrote text of their own"
            if found
            else "no text of their own (not language models, or too large): weights alone"
        )
        return found

    def probe_of_many(self, models: Sequence[Model], text: Tensor | None = None) -> Probe | None:
        return (
            make_probe(models, text=text, seed=self.seed, device=self.device)
            if self.generate_text and self.most_tries(models[0]) > 1
            else None
        )

    @property
    def grid(self) -> WeightingGrid:
        return GRID
