"""Efforts: how much work an alignment without data takes, from seconds to minutes.

- `fast` matches weights; of masked models, and of others whose stream only permutes, also what
  flows through them on a little text.
- `standard` goes on from there: the symmetry is learned for a short while, on text that both
  models sample, or on synthetic images. The first steps gain the most.
- `best` learns for longer, and matches units and heads again meanwhile.

Rates and lengths were chosen on several pairs, 256 and 768 wide (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import final

from symmerge.evaluation.data.self_generated import longest_text
from symmerge.evaluation.tasks.catalog import SELF_SOURCES, TASKS, make_task, task_of
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.learning.start import START_SAMPLES
from symmerge.matching.recipes import RECIPES, Recipe
from symmerge.matching.weights import WeightMatching
from symmerge.models.model import Model, device_of

EFFORTS: Mapping[str, str] = {
    "fast": "weights alone",
    "standard": "weights, then a short refinement, learned from self-generated inputs",
    "best": "the same, learned for longer",
}
USUAL = "standard"
# 1e-2 is too much at 768 wide, 3e-3 is not; and for images at 256 wide, too
HIGHEST_RATE, RATE_OF_IMAGES, ITS_WIDTH = 1e-2, 3e-3, 256


@final
@dataclass(frozen=True)
class Amount:
    """How much is learned, in steps of `batch_size` inputs, from `generated` ones."""

    steps: int
    generated: int
    batch_size: int
    generated_length: int | None = None  # of text, in tokens

    def in_rows_of(self, model: Model) -> Amount:
        """As many tokens, in more and shorter rows for a model of few positions."""
        if self.generated_length is None:
            return self
        length = longest_text(model, self.generated_length)
        times = self.generated_length / length
        return Amount(
            self.steps, round(times * self.generated), round(times * self.batch_size), length
        )


# A GPU takes as long for a thousand tokens as for one; a processor does not.
AMOUNTS: Mapping[tuple[str, str], Mapping[str, Amount]] = {
    ("standard", "cpu"): {
        "clm": Amount(110, 192, 8, 128),
        "seq2seq": Amount(110, 192, 8, 128),
        "mlm": Amount(110, 64, 8, 128),
        "image": Amount(110, 1000, 20),
    },
    ("standard", "cuda"): {
        "clm": Amount(250, 512, 12, 256),
        "seq2seq": Amount(250, 512, 12, 256),
        "mlm": Amount(250, 512, 24, 128),
        "image": Amount(250, 4000, 64),
    },
    ("best", "cpu"): {
        "clm": Amount(1500, 512, 8, 128),
        "seq2seq": Amount(1500, 512, 8, 128),
        "mlm": Amount(1500, 256, 8, 128),
        "image": Amount(1500, 4000, 20),
    },
    ("best", "cuda"): {
        "clm": Amount(6000, 2048, 12, 256),
        "seq2seq": Amount(6000, 2048, 12, 256),
        "mlm": Amount(6000, 2048, 24, 128),
        "image": Amount(6000, 10_000, 64),
    },
}


LABELLED_TEXT = Amount(250, 10_000, 32)
"""Of a classifier of texts, which needs data."""


def effort_recipe(
    effort: str, model: Model, *, given: bool = False, seed: int = 0, device: str = "cpu"
) -> Recipe:
    """The recipe of an effort, for models like this one; its data may be `given` later.

    Classifiers of texts cannot generate inputs: without data, their weights are matched.
    """
    weights = WeightMatching(
        generate_text=_needs_text(model),
        unigrams=True,
        tries=1,
        seed=seed,
        device=device,
    )
    about = f"{effort} effort: {EFFORTS[effort]}"
    # some have no head
    has_task = model.spec.task in {one for task in TASKS.values() for one in task.purposes}
    kind = task_of(model) if has_task else ""
    if effort == "fast" or not (given or kind in SELF_SOURCES):
        return replace(RECIPES["weights-only"], about=about, matching=weights)
    amount = amount_of(effort, model, kind, device)
    learned = LearnedMatching(
        start=_observed(model, seed, device)
        if kind == "image" and _only_permutes(model)
        else weights,
        **asdict(amount),
        lr=learning_rate(model, kind),
        permutations=effort == "best",
        seed=seed,
        device=device,
    )
    return Recipe(about=about, matching=learned)


def _observed(model: Model, seed: int, device: str) -> ActivationMatching:
    """A start from what flows through both models on synthetic images.

    A pair of CLIPs on digits: .78 of averaging's barrier by weights, .34 so.
    """
    samples = START_SAMPLES["image"]
    data = make_task("image", "self", [model], samples=samples, seed=seed)
    return ActivationMatching(data=data, tries=1, seed=seed, device=device)


def _only_permutes(model: Model) -> bool:
    """Whether a stream lies between norms with gains of its own: an order has to be found."""
    return not all(map(model.spec.rotates, model.spec.streams))


def amount_of(effort: str, model: Model, kind: str, device: str) -> Amount:
    """How much an effort learns from inputs of a kind."""
    return AMOUNTS[effort, device_of(device).type].get(kind, LABELLED_TEXT).in_rows_of(model)


def _needs_text(model: Model) -> bool:
    """Whether weights alone say too little, and what flows through both models says more.

    Frequencies of tokens say little of a masked model. A stream between norms with gains of its own
    only permutes, and an order has to be found at once: `fast` of Gemma 3 .88 -> .42 with text.
    """
    return model.spec.task == "masked-lm" or _only_permutes(model)


def learning_rate(model: Model, kind: str) -> float:
    """A rotation of many coordinates moves further by the same step in each."""
    width, highest = model.spec.sizes[model.spec.stream], HIGHEST_RATE
    if kind == "image":
        highest = RATE_OF_IMAGES
    return highest * min(1.0, ITS_WIDTH / width)
