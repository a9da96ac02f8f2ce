"""The published ways to match, by name, beside ours. Each is the same solver with other options, so differences are the methods' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symmerge.errors import MismatchError
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.evidence import Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.learned import LearnedMatching
from symmerge.matching.non_symmetric import NON_SYMMETRIC
from symmerge.matching.search import Matching
from symmerge.matching.soft import SoftMatching
from symmerge.matching.weights import WeightMatching
from symmerge.models.canonical.form import STEPS, canonicalize
from symmerge.models.model import Model
from symmerge.symmetry.groups import RotaryPairs, Trivial

Solver = Matching | LearnedMatching | SoftMatching

RAW = Weighting(norm=0.0)
"""Squared errors as they are: what the published methods minimise."""


@dataclass(frozen=True)
class Recipe:
    """What may move, what is done to both models first, and how the solver is set."""

    about: str
    matching: Solver = field(default_factory=WeightMatching)
    restrict: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    steps: tuple[str, ...] = tuple(STEPS)
    non_symmetric: str | None = None

    @property
    def method(self) -> str:
        """What it looks at, or how it finds its elements: weights, activations, learned or soft."""
        return self.matching.method

    @property
    def needs_data(self) -> bool:
        """Whether it looks at inputs; language models can write their own."""
        return self.method != "weights"

    def restricted(self, model: Model) -> dict[str, str]:
        """What this recipe forbids a model: a space it names may be absent, and rotary pairs can only stay where a permutation would break them."""
        groups = {name.partition(".")[0]: space.group for name, space in model.spec.spaces.items()}
        found = {space: to for space, to in self.restrict.items() if space in groups}
        return {
            space: "identity"
            if to == "permutation" and isinstance(groups[space], RotaryPairs | Trivial)
            else to
            for space, to in found.items()
        }

    def prepare(self, model: Model) -> Model:
        """The model with only what this recipe moves allowed to move, in the form it wants."""
        model = (
            NON_SYMMETRIC[self.non_symmetric](model)
            if self.non_symmetric and self.non_symmetric in NON_SYMMETRIC
            else model
        )
        return canonicalize(model.restrict(**self.restricted(model)), self.steps)


# What moves, by the names of the paper; the spaces that belong to each.
COMPONENTS = {
    "ff": ("ff",),
    "attention": ("head", "query", "qk", "vo"),
    "residual": ("residual",),
    "classifier": ("pooled", "classifier", "transform"),
}
CORRELATION = Weighting(
    norm=0.0, stream=1.0, heads=1.0, units=1.0, weights=0.0, score="correlation", all_layers=False
)


def correlation(
    about: str,
    *components: str,
    still: tuple[str, ...] = (),
    non_symmetric: str | None = None,
    untie: bool = False,
    **options: Any,
) -> Recipe:
    """Permutations by the correlation of activations: the components named may move, but for the spaces that stay `still`."""
    moving = {space for component in components for space in COMPONENTS[component]} - set(still)
    restrict = {
        space: "permutation" if space in moving else "identity"
        for spaces in COMPONENTS.values()
        for space in spaces
    }
    options = {"heads": HeadOptions(follow=True), **options}
    matching = ActivationMatching(weighting=CORRELATION, held_out=0.0, max_sweeps=1, **options)
    return Recipe(
        about, matching, MappingProxyType(restrict), ("untie",) if untie else (), non_symmetric
    )


def _published() -> dict[str, Recipe]:
    """The modes of correlation-based merging of text Transformers."""
    both, stream = ("ff", "attention"), "the stream alone, by its correlation"
    found = {
        "correlation": correlation(
            "correlation of activations: units, and heads as wholes with the coordinates inside them",
            *both,
        ),
        "correlation-ff": correlation("correlation of activations: units alone", "ff"),
        "correlation-attention": correlation(
            "correlation of activations: heads and the coordinates inside them alone", "attention"
        ),
        "correlation-monotonic": correlation(
            "correlation of activations: units, and coordinates inside heads that stay in order",
            *both,
            still=("head",),
        ),
        "correlation-separate-qk": correlation(
            "correlation, with an order of their own for queries and keys",
            *both,
            heads=HeadOptions(),
        ),
        "correlation-ignore-heads": correlation(
            "correlation, heads torn apart: NO SYMMETRY, for comparison",
            *both,
            non_symmetric="ignore-heads",
        ),
        "correlation-classifier": correlation(
            "correlation: units, heads, and what the classifier or the decoder reads",
            *both,
            "classifier",
        ),
        "correlation-all": correlation(
            "correlation: units, heads, the stream, and what the classifier reads", *COMPONENTS
        ),
        "residual-separate": correlation(
            f"{stream} anew after every block: NO SYMMETRY, for comparison",
            "residual",
            non_symmetric="separate-streams",
        ),
    }
    for places in ("first", "last", "all"):
        where = "in all layers together" if places == "all" else f"at its {places} place"
        found[f"residual-{places}"] = correlation(f"{stream} {where}", "residual", places=places)
        about = f"{stream} {where}; the decoder untied, and what it reads a space of its own"
        found[f"residual-{places}-untied"] = correlation(
            about, "residual", "classifier", places=places, untie=True
        )
    return found


REBASIN = WeightMatching(
    weighting=replace(RAW, all_layers=True), generate_text=False, max_sweeps=50, tolerance=0.0
)
GENERALIZED = WeightMatching(
    weighting=replace(RAW, all_layers=True),
    generate_text=False,
    max_sweeps=15,
    tolerance=-1.0,
    heads=HeadOptions(metric="frobenius"),
)
PERMUTATIONS = Recipe(
    "git re-basin: only permutations (units, heads, stream), from the weights as they are, sweeps until nothing changes",
    REBASIN,
    {"residual": "permutation", "ff": "permutation", "qk": "identity", "vo": "identity"},
    steps=(),
)
RECIPES: Mapping[str, Recipe] = {
    "symmerge": Recipe(
        "ours: every symmetry; evidence weighted by what the parents' own text says, several weightings, the best kept"
    ),
    "weights-only": Recipe(
        "ours without own text: every symmetry, from the tensors alone",
        WeightMatching(generate_text=False),
    ),
    "permutations": PERMUTATIONS,
    "orthogonal": Recipe(
        "generalized linear mode connectivity: rotation of the stream from all layers, heads by the Frobenius distance of their circuits,"
        " 15 sweeps; with a rotation inside each head, because its inflated attention is no stock checkpoint",
        GENERALIZED,
    ),
    "two-stage": Recipe(
        "functional equivalence of attention: heads by the distance of their circuits, then any invertible basis inside (closed form under"
        " rotary positions, gradient refinement otherwise); the stream and the units stay as they are",
        WeightMatching(
            weighting=replace(RAW, all_layers=False),
            generate_text=False,
            max_sweeps=1,
            heads=HeadOptions(metric="frobenius", inside="gradient"),
        ),
        {"residual": "identity", "ff": "identity"},
    ),
    "activations": Recipe(
        "ours with data: every symmetry, weights and activations mixed as a held-out part of the data says",
        ActivationMatching(),
    ),
    "activations-untied": Recipe(
        "ours with data, tied tensors untied first, so that what a decoder reads moves by itself; the checkpoint grows by the decoder",
        ActivationMatching(),
        steps=("untie", *STEPS),
    ),
    **_published(),
    "learned": Recipe(
        "ours, learned: every symmetry moves by gradient so that the middle answers what its parents say together",
        LearnedMatching(),
    ),
    "learned-permutations": Recipe(
        "learned, permutations alone (units, heads, stream), from git re-basin's",
        LearnedMatching(start=REBASIN, target="labels"),
        PERMUTATIONS.restrict,
        PERMUTATIONS.steps,
    ),
    "learned-published": Recipe(
        "learned as in generalized linear mode connectivity: rotation of the stream, units and heads, by labels, rate 3e-4, 30 times through the data"
        " in batches of 128, from its weight matching; with the start's rotation inside each head, because its inflated attention is no stock checkpoint",
        LearnedMatching(
            start=GENERALIZED,
            target="labels",
            lr=3e-4,
            epochs=30.0,
            batch_size=128,
            spaces=("residual", "head", "query", "ff"),
            patience=20,
        ),
    ),
    "soft": Recipe(
        "learned soft permutations of units and heads, by Sinkhorn: NO SYMMETRY unless hardened",
        SoftMatching(),
        {"ff": "permutation"},
        non_symmetric="soft",
    ),
    "soft-hardened": Recipe(
        "learned soft permutations of units and heads, each made the nearest permutation at the end",
        SoftMatching(),
        {"ff": "permutation"},
    ),
}


BY_METHOD = {
    method: {name: chosen for name, chosen in RECIPES.items() if chosen.method == method}
    for method in ("weights", "activations", "learned", "soft")
}
DATA_FREE, WITH_DATA = BY_METHOD["weights"], BY_METHOD["activations"]


def get_recipe(name: str) -> Recipe:
    """One of `RECIPES`; others are refused with the list."""
    if name not in RECIPES:
        raise MismatchError(f"no recipe called '{name}': there are {', '.join(RECIPES)}")
    return RECIPES[name]


def with_options(chosen: Recipe, **options: Any) -> Recipe:
    """The recipe with some of its solver's options changed; None leaves one as it is. What a learned one does not know is meant for its start."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(chosen.matching, Matching):
        return replace(chosen, matching=_matching(chosen.matching, given))
    own = {
        name: given.pop(name)
        for name in (*given,)
        if name in {known.name for known in fields(chosen.matching)}
    }
    learned = replace(chosen.matching, **own)
    start = learned.start
    both = {name: own[name] for name in ("seed", "device") if name in own}
    if start is None and given:
        start = LearnedMatching.first(learned.data)
    if isinstance(start, Matching):
        start = _matching(start, {**given, **both})
    return replace(chosen, matching=replace(learned, start=start))


def _matching(matching: Matching, given: Mapping[str, Any]) -> Matching:
    heads = {name: given[name] for name in ("metric", "inside") if name in given}
    others = {name: value for name, value in given.items() if name not in (*heads, "score")}
    if "score" in given:
        others["weighting"] = replace(
            matching.weighting or matching.start(None), score=given["score"]
        )
    return replace(matching, **others, heads=replace(matching.heads, **heads))


def read_counts(path: Path) -> Tensor:
    """How often each token occurred, from a .npy file of whole numbers."""
    try:
        counts = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise MismatchError(
            f"{path} is no .npy file of counts ({error}): save one with numpy.save"
        ) from error
    if counts.ndim != 1 or not np.issubdtype(counts.dtype, np.number) or (counts < 0).any():
        raise MismatchError(
            f"{path} holds {counts.dtype} of shape {list(counts.shape)}: one count per token is needed, none negative"
        )
    return torch.from_numpy(counts.astype(np.float32))
