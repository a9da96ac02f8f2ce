"""mergekit's merge methods by its own definitions, on models in one basin. Nothing is aligned.

Checked against the real mergekit by `benchmarks/mergekit.py`. Only the draws of DARE differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights, working
from symmerge.errors import MismatchError
from symmerge.merging.combining import agreeing_sums, generator_for, slerp
from symmerge.merging.mergekit_settings import Setting
from symmerge.models.interpolation import merge_step, weighted_sum
from symmerge.models.label_sets import with_all_labels
from symmerge.models.model import Model
from symmerge.models.tables import check_same_table, layer_count

LAYER = re.compile(r"\.(\d+)\.")  # of a tensor's name
SMALLEST_SUM = 1e-8  # of weights that are divided by: mergekit leaves smaller ones alone
SMALLEST_SIZE = 1e-7  # of differences that are scaled: likewise


@final
@dataclass(frozen=True)
class MergekitMethodRules:
    """What a method takes, and mergekit's defaults for it."""

    of_models: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    flags: Mapping[str, bool] = field(default_factory=dict)
    from_base: bool = False  # mixes differences from a base
    elects: bool = False  # only differences of the winning sign count
    random: bool = False  # thins at random, not by size
    max_models: int | None = None


METHOD_RULES: Mapping[str, MergekitMethodRules] = {
    "linear": MergekitMethodRules(("weight",), (), {"normalize": True}),
    "slerp": MergekitMethodRules((), ("t",), max_models=2),
    "task_arithmetic": MergekitMethodRules(
        ("weight",), ("lambda",), {"normalize": False, "int8_mask": False}, from_base=True
    ),
    "ties": MergekitMethodRules(
        ("weight", "density"),
        ("lambda",),
        {"normalize": True, "rescale": False, "int8_mask": False},
        from_base=True,
        elects=True,
    ),
    "dare_linear": MergekitMethodRules(
        ("weight", "density"),
        ("lambda",),
        {"normalize": False, "rescale": True, "int8_mask": False},
        from_base=True,
        random=True,
    ),
    "dare_ties": MergekitMethodRules(
        ("weight", "density"),
        ("lambda",),
        {"normalize": False, "rescale": True, "int8_mask": False},
        from_base=True,
        elects=True,
        random=True,
    ),
}
DEFAULTS = {"density": 1.0, "lambda": 1.0}  # there is none for weight and t


@final
@dataclass(frozen=True)
class MergekitSource:
    """One model of a config, and its own parameters."""

    model: str
    settings: Mapping[str, Setting] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class MergekitMerge:
    """A merge as a mergekit config says it: `merge(read_mergekit("merge.yml"))`.

    `sources` begin with the base, if there is one; that is what the others are aligned to.
    """

    file: str
    method: str
    sources: tuple[MergekitSource, ...]
    has_base: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    dtype: str | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Folders or hub names, in the order in which they are aligned."""
        return tuple(source.model for source in self.sources)

    @property
    def rules(self) -> MergekitMethodRules:
        """What the method takes."""
        return METHOD_RULES[self.method]

    def value(self, name: str, tensor: str, depth: float, number: int | None = None) -> float:
        """A parameter for a tensor: the model's own, else that of the merge, else the default."""
        own = self.sources[number].settings if number is not None else {}
        for settings in (own, self.settings):
            value = settings[name].at(tensor, depth) if name in settings else None
            if value is not None:
                return value
        if name not in DEFAULTS:
            whose = f"{self.sources[number].model}: " if number is not None else ""
            raise MismatchError(f"{self.file}: {whose}{name} has no value for {tensor}: give one")
        return DEFAULTS[name]

    def shares(self) -> list[float]:
        """How much each model counts, for the record; equal where that differs by tensor."""
        count = len(self.sources)
        equal, t = [1 / count] * count, self.settings.get("t")
        if t is not None and t.constant is not None:
            return [1 - t.constant, t.constant]
        own = [
            source.settings.get("weight", self.settings.get("weight")) for source in self.sources
        ]
        weights = [None if one is None else one.constant for one in own]
        total = sum(one or 0.0 for one in weights)
        if self.rules.from_base or total <= 0 or any(one is None or one < 0 for one in weights):
            return equal
        return [(one or 0.0) / total for one in weights]

    def combined(
        self,
        models: Sequence[Model],
        evidence: Mapping[str, object] | None = None,
        *,
        seed: int = 0,
    ) -> Model:
        """The merge of models in one basin, in the order of `models`. Lazy."""
        if len(models) != len(self.sources):
            raise MismatchError(
                f"{self.file} merges {len(self.sources)} models, but only {len(models)} could be"
                " aligned: leave out the others"
            )
        check_same_table(models)
        models = with_all_labels(models)
        first, shares = models[0], self.shares()
        what = f"{self.method} of {', '.join(model.where for model in models)}, by {self.file}"
        details = {"method": self.method, "mergekit": self.file, "weights": shares}
        step = merge_step(models, shares, what, evidence=evidence, details=details)
        compute = partial(_tensor, self, models, layer_count(first), seed)
        tensors = {name: partial(compute, name) for name in first.weights}
        return first.derive(DerivedWeights(first.weights, tensors), step=step)


def _tensor(
    merge: MergekitMerge, models: Sequence[Model], layers: int, seed: int, name: str
) -> Tensor:
    depth, count = tensor_depth(name, layers), len(models)
    read = (model.weights[name] for model in models)
    if merge.method == "slerp":
        t = merge.value("t", name, depth)
        return slerp(read, [1 - t, t])
    first = 1 if merge.rules.from_base else 0
    weights = [merge.value("weight", name, depth, number) for number in range(first, count)]
    if merge.method == "linear":
        total = sum(weights) if merge.flags["normalize"] else 1.0
        if total == 0:
            raise MismatchError(f"{merge.file}: the weights for {name} sum to 0: give others")
        return weighted_sum(read, [weight / total for weight in weights])
    base = next(read)
    numbered = enumerate(read, 1)
    differences = (
        _thinned(merge, other.to(base) - base, name, depth, number, seed)
        for number, other in numbered
    )
    mixed = _mixed(merge, differences, weights) * merge.value("lambda", name, depth)
    return (base + mixed).to(working(models[0].weights.dtype(name)))


def tensor_depth(name: str, layers: int) -> float:
    """Where a tensor is, from 0 (first layer) to 1 (last); 0 outside of the layers."""
    match = LAYER.search(name)
    if match is None:
        return 0.0
    return int(match[1]) / (layers - 1) if layers > 1 else 1.0


def _thinned(
    merge: MergekitMerge, difference: Tensor, name: str, depth: float, number: int, seed: int
) -> Tensor:
    """The share of a difference that is kept; scaled to its size before, if that is asked for."""
    if "density" not in merge.rules.of_models:
        return difference
    density = merge.value("density", name, depth, number)
    if not 0 <= density <= 1:
        raise MismatchError(f"{merge.file}: density {density:g}: give a share from 0 to 1")
    if density == 1:
        return difference
    generator = generator_for(seed, number, name)
    if merge.rules.random:
        kept = difference * (torch.rand(difference.shape, generator=generator) < density)
    else:
        kept = _largest(difference, density)
    before, after = difference.abs().sum(), kept.abs().sum()
    if not merge.flags["rescale"] or min(before, after) < SMALLEST_SIZE:
        return kept
    return kept * (before / after)


def _largest(difference: Tensor, density: float) -> Tensor:
    """The entries of largest size; at least one, unless the density is 0.

    Weights from half precision often have dozens of equal entries at the cut. `combine` keeps the
    first of them on any machine; here they are chosen as mergekit does, by an unstable sort.
    """
    count = max(1, int(density * difference.numel())) if density else 0
    mask = torch.zeros(difference.numel(), dtype=difference.dtype)
    mask[difference.abs().flatten().argsort(descending=True)[:count]] = 1
    return difference * mask.view(difference.shape)


def _mixed(merge: MergekitMerge, differences: object, weights: Sequence[float]) -> Tensor:
    if merge.rules.elects:
        total, weight_sum = agreeing_sums(differences, weights)  # type: ignore[arg-type]
        divisor = torch.where(weight_sum != 0, weight_sum, 1)
        return total / divisor if merge.flags["normalize"] else total
    total = weighted_sum(differences, weights)  # type: ignore[arg-type]
    divisor = sum(weights)
    if not merge.flags["normalize"] or abs(divisor) < SMALLEST_SUM:
        return total
    return total / divisor
