"""Combine many models that lie in one basin: means, and what people know from merging fine-tunes. Nothing is aligned here; give it aligned models."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights, working
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.models.interpolation import merge_step, weighted_sum
from symmerge.models.model import Model
from symmerge.models.tables import check_same_table

PARALLEL = 0.9995  # cosines beyond this, of either sign, have no arc between them: mergekit's threshold, so that both take the same tensors straight
SUMS_TO_ONE = 1e-6

Mix = Callable[[Iterable[Tensor], Sequence[float]], Tensor]
"""One tensor of several; the weights are not negative."""
Thin = Callable[[Tensor, float, torch.Generator], Tensor]
"""A share of a difference's entries, the others zero: (difference, density, chance)."""


@final
@dataclass(frozen=True)
class CombineMethod:
    """How one tensor of every model becomes one. With `thin`, what is mixed is not the tensors but their thinned differences from a base."""

    mix: Mix
    thin: Thin | None = None
    most: int | None = None


def slerp(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """The place on the arc from the first tensor to the second; where they are nearly parallel, on the straight line."""
    x, y = tensors
    y = y.to(x)
    cosine = torch.cosine_similarity(
        x.flatten(), y.flatten(), dim=0
    ).item()  # zeros are at right angles to everything, as in mergekit
    if abs(cosine) > PARALLEL:
        return weighted_sum((x, y), weights)
    angle = math.acos(cosine)
    return weighted_sum((x, y), [math.sin(weight * angle) / math.sin(angle) for weight in weights])


def agreed(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Every entry's weighted mean over those that have the sign of their weighted sum: zeros and the outvoted do not count."""
    votes = [tensor * weight for tensor, weight in zip(tensors, weights, strict=True)]
    sign = torch.where(sum(votes[1:], votes[0]) >= 0, 1, -1)
    total, weight_in_all = torch.zeros_like(votes[0]), torch.zeros_like(votes[0])
    for vote, weight in zip(votes, weights, strict=True):
        agrees = vote.sign() == sign
        total += vote * agrees
        weight_in_all += weight * agrees
    return total / torch.where(weight_in_all > 0, weight_in_all, 1)


def largest(difference: Tensor, density: float, _: torch.Generator) -> Tensor:
    """The entries of largest magnitude; at least one."""
    count = max(1, int(density * difference.numel()))
    flat = difference.flatten()
    kept = flat.abs().argsort(descending=True, stable=True)[:count]
    return torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view(difference.shape)


def by_chance(difference: Tensor, density: float, chance: torch.Generator) -> Tensor:
    """Each entry with this probability, grown so that the mean over all chances is the difference itself."""
    kept = torch.rand(difference.shape, generator=chance) < density
    return difference * kept / density


METHODS: dict[str, CombineMethod] = {
    "mean": CombineMethod(weighted_sum),
    "slerp": CombineMethod(slerp, most=2),
    "ties": CombineMethod(agreed, largest),
    "dare": CombineMethod(weighted_sum, by_chance),
    "dare_ties": CombineMethod(agreed, by_chance),
}


def combine(
    models: Sequence[Model],
    method: str = "mean",
    weights: Sequence[float] | None = None,
    *,
    base: Model | None = None,
    density: float = 0.5,
    seed: int = 0,
    evidence: Mapping[str, Any] | None = None,
) -> Model:
    """One model of several that lie in one basin: `combine([reference, *aligned], "ties", density=0.3)`. Lazy: one tensor of each at a time.

    `mean`; `slerp`, the arc between two; `ties`, each model's largest differences from `base`, of these the mean of those whose sign wins; `dare`,
    random differences grown by 1/density, added up by weight; `dare_ties`, such differences and the mean of those whose sign wins. `density` is the
    share of each tensor's differences that is kept. Weights are of all the models; equal unless given. `evidence` goes into the model card.

    Models from independent seeds have no common base. The first model stands in for it, and then has no difference of its own to vote with: `ties` of
    two models at density 1 is the second. Where the models are fine-tunes, or another model lies between them, give that as `base`.
    """
    how, shares = method_for(method, models, base, density), normalised(models, weights)
    origin = base or models[0]
    check_same_table([*models, origin])
    what = f"{method} of " + ", ".join(
        f"{share:g} x {model.where}" for model, share in zip(models, shares, strict=True)
    )
    settings: dict[str, Any] = {"method": method, "weights": shares}
    if how.thin:
        what += f"; differences from {origin.where}, density {density:g}, seed {seed}"
        settings |= {
            "density": density,
            "seed": seed,
            "base": {"where": origin.where, "sha256": origin.digest()},
        }
        compute = partial(_from_base, models, shares, origin, how.mix, how.thin, density, seed)
    else:
        compute = partial(_direct, models, shares, how.mix)
    step = (
        merge_step(models, shares, what)
        | settings
        | ({"evidence": dict(evidence)} if evidence else {})
    )
    return models[0].derive(
        DerivedWeights(
            models[0].weights, {name: partial(compute, name) for name in models[0].weights}
        ),
        step=step,
    )


def normalised(models: Sequence[Model], weights: Sequence[float] | None) -> list[float]:
    """One weight per model, summing to one; those that do not are made to, with a warning."""
    if weights is None:
        return [1 / len(models)] * len(models)
    if len(weights) != len(models):
        raise MismatchError(
            f"{len(models)} models but {len(weights)} weights: give one weight per model"
        )
    if wrong := [
        f"{weight:g} for {model.where}"
        for model, weight in zip(models, weights, strict=True)
        if not 0 <= weight < math.inf
    ]:
        raise MismatchError(f"weights {', '.join(wrong)}: a weight is a number from 0 up")
    total = sum(weights)
    if total == 0:
        raise MismatchError("all weights are 0: give at least one model a weight")
    if abs(total - 1) <= SUMS_TO_ONE:
        return list(weights)
    shares = [weight / total for weight in weights]
    warnings.warn(
        f"the weights sum to {total:g}, not 1: taken as {', '.join(f'{share:.4g}' for share in shares)}",
        SymmergeWarning,
        stacklevel=3,
    )
    return shares


def method_for(
    name: str, models: Sequence[Model], base: Model | None, density: float
) -> CombineMethod:
    """A method by name, if it can be used so."""
    if name not in METHODS:
        raise MismatchError(f"method {name}: there are {', '.join(METHODS)}")
    method = METHODS[name]
    if len(models) < 2:
        raise MismatchError(
            f"{len(models)} model{'' if len(models) == 1 else 's'}: there is nothing to combine; give two or more"
        )
    if method.most and len(models) > method.most:
        raise MismatchError(
            f"{len(models)} models: {name} takes {method.most}; combine {method.most} at a time, or all of them by mean"
        )
    if base is not None and not method.thin:
        differing = " or ".join(other for other, one in METHODS.items() if one.thin)
        raise MismatchError(
            f"base {base.where}: {name} takes no differences from a base; leave it out or use {differing}"
        )
    if method.thin and not 0 < density <= 1:
        raise MismatchError(
            f"density {density:g}: it is the share of the differences that is kept, more than 0 and at most 1"
        )
    return method


def _direct(models: Sequence[Model], shares: Sequence[float], mix: Mix, name: str) -> Tensor:
    return mix((model.weights[name] for model in models), shares)


def _from_base(
    models: Sequence[Model],
    shares: Sequence[float],
    base: Model,
    mix: Mix,
    thin: Thin,
    density: float,
    seed: int,
    name: str,
) -> Tensor:
    origin = base.weights[name]

    def differences() -> Iterator[Tensor]:
        for number, model in enumerate(models):
            # The base, where it is among the models, is not read again.
            yield (
                torch.zeros_like(origin)
                if model is base
                else thin(
                    model.weights[name].to(origin) - origin, density, _chance(seed, number, name)
                )
            )

    return (origin + mix(differences(), shares)).to(working(models[0].weights.dtype(name)))


def _chance(seed: int, number: int, name: str) -> torch.Generator:
    """Of its own for each tensor of each model: whatever is read first, chance is the same."""
    key = hashlib.sha256(f"{seed} {number} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
