"""The published ways to match, by name, beside ours. Each is the same solver with other options, so differences are the methods' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symmerge.canonical import STEPS, canonicalize
from symmerge.errors import MismatchError
from symmerge.groups import RotaryPairs, Trivial
from symmerge.matching.activations import ActivationMatching
from symmerge.matching.evidence import Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.loose import LOOSE
from symmerge.matching.search import Matching
from symmerge.matching.weights import WeightMatching
from symmerge.model import Model

RAW = Weighting(norm=0.0)
"""Squared errors as they are: what the published methods minimise."""


@dataclass(frozen=True)
class Recipe:
    """What may move, what is done to both models first, and how the solver is set."""

    about: str
    matching: Matching = field(default_factory=WeightMatching)
    restrict: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    steps: tuple[str, ...] = tuple(STEPS)
    loose: str | None = None

    @property
    def needs_data(self) -> bool:
        """Whether it looks at what flows through the models."""
        return isinstance(self.matching, ActivationMatching)

    def restricted(self, model: Model) -> dict[str, str]:
        """What this recipe forbids a model: a space it names may be absent, and rotary pairs can only stay where a permutation would break them."""
        groups = {name.partition(".")[0]: space.group for name, space in model.spec.spaces.items()}
        found = {space: to for space, to in self.restrict.items() if space in groups}
        return {space: "identity" if to == "permutation" and isinstance(groups[space], RotaryPairs | Trivial) else to for space, to in found.items()}

    def ready(self, model: Model) -> Model:
        """The model with only what this recipe moves allowed to move, in the form it wants."""
        model = LOOSE[self.loose](model) if self.loose else model
        return canonicalize(model.restrict(**self.restricted(model)), self.steps)


# What moves, by the names of the paper; the spaces that belong to each.
COMPONENTS = {"ff": ("ff",), "attention": ("head", "query", "qk", "vo"), "residual": ("residual",), "classifier": ("pooled", "classifier", "transform")}
CORRELATION = Weighting(norm=0.0, stream=1.0, heads=1.0, units=1.0, weights=0.0, score="correlation", all_layers=False)


def correlation(about: str, *components: str, still: tuple[str, ...] = (), loose: str | None = None, untie: bool = False, **options: Any) -> Recipe:
    """Permutations by the correlation of activations: the components named may move, but for the spaces that stay `still`."""
    moving = {space for component in components for space in COMPONENTS[component]} - set(still)
    restrict = {space: "permutation" if space in moving else "identity" for spaces in COMPONENTS.values() for space in spaces}
    options = {"heads": HeadOptions(follow=True), **options}
    matching = ActivationMatching(weighting=CORRELATION, held_out=0.0, max_sweeps=1, **options)
    return Recipe(about, matching, MappingProxyType(restrict), ("untie",) if untie else (), loose)


def _published() -> dict[str, Recipe]:
    """The modes of correlation-based merging of text Transformers."""
    both, stream = ("ff", "attention"), "the stream alone, by its correlation"
    found = {
        "correlation": correlation("correlation of activations: units, and heads as wholes with the coordinates inside them", *both),
        "correlation-ff": correlation("correlation of activations: units alone", "ff"),
        "correlation-attention": correlation("correlation of activations: heads and the coordinates inside them alone", "attention"),
        "correlation-monotonic": correlation("correlation of activations: units, and coordinates inside heads that stay in order", *both, still=("head",)),
        "correlation-separate-qk": correlation("correlation, with an order of their own for queries and keys", *both, heads=HeadOptions()),
        "correlation-ignore-heads": correlation("correlation, heads torn apart: NO SYMMETRY, for comparison", *both, loose="ignore-heads"),
        "correlation-classifier": correlation("correlation: units, heads, and what the classifier or the decoder reads", *both, "classifier"),
        "correlation-all": correlation("correlation: units, heads, the stream, and what the classifier reads", *COMPONENTS),
        "residual-separate": correlation(f"{stream} anew after every block: NO SYMMETRY, for comparison", "residual", loose="separate-streams"),
    }
    for places in ("first", "last", "all"):
        where = "in all layers together" if places == "all" else f"at its {places} place"
        found[f"residual-{places}"] = correlation(f"{stream} {where}", "residual", places=places)
        about = f"{stream} {where}; the decoder untied, and what it reads a space of its own"
        found[f"residual-{places}-untied"] = correlation(about, "residual", "classifier", places=places, untie=True)
    return found


RECIPES: Mapping[str, Recipe] = {
    "symmerge": Recipe("ours: every symmetry; evidence weighted by what the parents' own text says, several weightings, the best kept"),
    "weights-only": Recipe("ours without own text: every symmetry, from the tensors alone", WeightMatching(own_text=False)),
    "permutations": Recipe(
        "git re-basin: only permutations (units, heads, stream), from the weights as they are, sweeps until nothing changes",
        WeightMatching(weighting=replace(RAW, all_layers=True), own_text=False, max_sweeps=50, tolerance=0.0),
        {"residual": "permutation", "ff": "permutation", "qk": "identity", "vo": "identity"},
        steps=(),
    ),
    "orthogonal": Recipe(
        "generalized linear mode connectivity: rotation of the stream from all layers, heads by the Frobenius distance of their circuits,"
        " 15 sweeps; with a rotation inside each head, because its inflated attention is no stock checkpoint",
        WeightMatching(weighting=replace(RAW, all_layers=True), own_text=False, max_sweeps=15, tolerance=-1.0, heads=HeadOptions(metric="frobenius")),
    ),
    "two-stage": Recipe(
        "functional equivalence of attention: heads by the distance of their circuits, then any invertible basis inside (closed form under"
        " rotary positions, gradient refinement otherwise); the stream and the units stay as they are",
        WeightMatching(weighting=replace(RAW, all_layers=False), own_text=False, max_sweeps=1, heads=HeadOptions(metric="frobenius", inside="gradient")),
        {"residual": "identity", "ff": "identity"},
    ),
    "activations": Recipe("ours with data: every symmetry, weights and activations mixed as a held-out part of the data says", ActivationMatching()),
    "activations-untied": Recipe(
        "ours with data, tied tensors untied first, so that what a decoder reads moves by itself; the checkpoint grows by the decoder",
        ActivationMatching(),
        steps=("untie", *STEPS),
    ),
    **_published(),
}


DATA_FREE = {name: chosen for name, chosen in RECIPES.items() if not chosen.needs_data}
WITH_DATA = {name: chosen for name, chosen in RECIPES.items() if chosen.needs_data}


def recipe(name: str) -> Recipe:
    """One of `RECIPES`; others are refused with the list."""
    if name not in RECIPES:
        raise MismatchError(f"no recipe called '{name}': there are {', '.join(RECIPES)}")
    return RECIPES[name]


def with_options(chosen: Recipe, **options) -> Recipe:
    """The recipe with some of the solver's options changed; None leaves one as it is."""
    heads = {name: options.pop(name) for name in ("metric", "inside") if name in options}
    heads = {name: value for name, value in heads.items() if value is not None}
    given = {name: value for name, value in options.items() if value is not None}
    if score := given.pop("score", None):
        given["weighting"] = replace(chosen.matching.weighting or chosen.matching.start(None), score=score)
    matching = replace(chosen.matching, **given, heads=replace(chosen.matching.heads, **heads))
    return replace(chosen, matching=matching)


def read_counts(path: Path) -> Tensor:
    """How often each token occurred, from a .npy file of whole numbers."""
    try:
        counts = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise MismatchError(f"{path} is no .npy file of counts ({error}): save one with numpy.save") from error
    if counts.ndim != 1 or not np.issubdtype(counts.dtype, np.number) or (counts < 0).any():
        raise MismatchError(f"{path} holds {counts.dtype} of shape {list(counts.shape)}: one count per token is needed, none negative")
    return torch.from_numpy(counts.astype(np.float32))
