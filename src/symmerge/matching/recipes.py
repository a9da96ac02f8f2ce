"""The published ways to match weights, by name, beside ours. Each is the same solver with other options, so differences are the methods' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from symmerge.canonical import STEPS
from symmerge.errors import MismatchError
from symmerge.matching.evidence import Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.weights import WeightMatching
from symmerge.model import Model

RAW = Weighting(norm=0.0)
"""Squared errors as they are: what the published methods minimise."""


@dataclass(frozen=True)
class Recipe:
    """What may move, what is done to both models first, and how the solver is set."""

    about: str
    matching: WeightMatching = field(default_factory=WeightMatching)
    restrict: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    steps: tuple[str, ...] = tuple(STEPS)

    def restricted(self, model: Model) -> dict[str, str]:
        """What this recipe forbids a model: a space it names may be absent."""
        known = {name.partition(".")[0] for name in model.spec.spaces}
        return {space: to for space, to in self.restrict.items() if space in known}

    def ready(self, model: Model) -> Model:
        """The model with only what this recipe moves allowed to move."""
        return model.restrict(**self.restricted(model))


RECIPES: Mapping[str, Recipe] = {
    "symmerge": Recipe("ours: every symmetry; evidence weighted by what the parents' own text says, several weightings, the best kept"),
    "weights-only": Recipe("ours without own text: every symmetry, from the tensors alone", WeightMatching(own_text=False)),
    "permutations": Recipe(
        "git re-basin: only permutations (units, heads, stream), from the weights as they are, sweeps until nothing changes",
        WeightMatching(weighting=RAW, own_text=False, all_layers=True, max_sweeps=50, tolerance=0.0),
        {"residual": "permutation", "ff": "permutation", "qk": "identity", "vo": "identity"},
        steps=(),
    ),
    "orthogonal": Recipe(
        "generalized linear mode connectivity: rotation of the stream from all layers, heads by the Frobenius distance of their circuits,"
        " 15 sweeps; with a rotation inside each head, because its inflated attention is no stock checkpoint",
        WeightMatching(weighting=RAW, own_text=False, all_layers=True, max_sweeps=15, tolerance=-1.0, heads=HeadOptions(metric="frobenius")),
    ),
    "two-stage": Recipe(
        "functional equivalence of attention: heads by the distance of their circuits, then any invertible basis inside (closed form under"
        " rotary positions, gradient refinement otherwise); the stream and the units stay as they are",
        WeightMatching(weighting=RAW, own_text=False, all_layers=False, max_sweeps=1, heads=HeadOptions(metric="frobenius", inside="gradient")),
        {"residual": "identity", "ff": "identity"},
    ),
}


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
