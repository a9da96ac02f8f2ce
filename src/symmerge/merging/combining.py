"""Combine models in one basin by mean, slerp, TIES or DARE. Nothing is aligned here."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights, working
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.models.interpolation import merge_step, weighted_sum
from symmerge.models.label_sets import with_all_labels
from symmerge.models.model import Model
from symmerge.models.tables import check_same_table

# Above this |cosine|, slerp falls back to the straight line. mergekit's threshold, so that both
# treat the same tensors alike.
PARALLEL = 0.9995
SUMS_TO_ONE = 1e-6

Mix = Callable[[Iterable[Tensor], Sequence[float]], Tensor]
"""Mix several tensors into one, by non-negative weights."""
Thin = Callable[[Tensor, float, torch.Generator], Tensor]
"""Zero all but a share of a difference's entries: (difference, density, generator)."""


@final
@dataclass(frozen=True)
class CombineMethod:
    """How the models' versions of one tensor are mixed.

    With `thin`, sparsified differences from a base are mixed instead of the tensors.
    """

    mix: Mix
    thin: Thin | None = None
    max_models: int | None = None


def slerp(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Spherical interpolation of two tensors; linear if they are nearly parallel."""
    x, y = tensors
    y = y.to(x)
    # A zero tensor counts as orthogonal to everything, as in mergekit.
    cosine = torch.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()
    if abs(cosine) > PARALLEL:
        return weighted_sum((x, y), weights)
    angle = math.acos(cosine)
    return weighted_sum((x, y), [math.sin(weight * angle) / math.sin(angle) for weight in weights])


def agreeing_mean(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of each entry over the tensors whose sign is that of the weighted sum."""
    total, weight_sum = agreeing_sums(tensors, weights)
    return total / torch.where(weight_sum != 0, weight_sum, 1)


def agreeing_sums(tensors: Iterable[Tensor], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Of each entry the weighted sum over the tensors whose sign is the winning one; the weights.

    The winning sign is that of the weighted sum over all tensors, plus where that is zero.
    """
    votes = [tensor * weight for tensor, weight in zip(tensors, weights, strict=True)]
    sign = torch.where(sum(votes[1:], votes[0]) >= 0, 1, -1)
    total, weight_sum = torch.zeros_like(votes[0]), torch.zeros_like(votes[0])
    for vote, weight in zip(votes, weights, strict=True):
        agrees = vote.sign() == sign
        total += vote * agrees
        weight_sum += weight * agrees
    return total, weight_sum


def keep_largest(difference: Tensor, density: float, _: torch.Generator) -> Tensor:
    """Keep the entries of largest magnitude; at least one."""
    count = max(1, int(density * difference.numel()))
    flat = difference.flatten()
    places = flat.abs().argsort(descending=True, stable=True)[:count]
    return torch.zeros_like(flat).index_copy_(0, places, flat[places]).view(difference.shape)


def keep_random(difference: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Keep each entry with probability `density`, and divide by it: unbiased."""
    mask = torch.rand(difference.shape, generator=generator) < density
    return difference * mask / density


METHODS: dict[str, CombineMethod] = {
    "mean": CombineMethod(weighted_sum),
    "slerp": CombineMethod(slerp, max_models=2),
    "ties": CombineMethod(agreeing_mean, keep_largest),
    "dare": CombineMethod(weighted_sum, keep_random),
    "dare_ties": CombineMethod(agreeing_mean, keep_random),
}


def combine(
    models: Sequence[Model],
    method: str = "mean",
    weights: Sequence[float] | None = None,
    *,
    base: Model | None = None,
    density: float = 0.5,
    seed: int = 0,
    evidence: Mapping[str, object] | None = None,
) -> Model:
    """Combine models in one basin: `combine(result.models, "ties", density=0.3)`. Lazy.

    | method | what it does |
    |---|---|
    | `mean` | weighted mean |
    | `slerp` | the arc between two models |
    | `ties` | largest differences from `base`, sign election, mean of those that agree |
    | `dare` | random differences, divided by `density`, weighted sum |
    | `dare_ties` | random differences, sign election, mean of those that agree |

    `density` is the share of each tensor's differences that is kept; `evidence` goes into the card.
    Models from independent seeds have no common base: by default the first model is the base and
    has no vote of its own (`ties` of two models at density 1 is the second model).
    """
    how, shares = method_for(method, models, base, density), normalised_weights(models, weights)
    origin = base or models[0]
    check_same_table([*models, origin])
    *models, origin = _with_all_labels(models, origin)
    terms = (f"{share:g} x {model.where}" for model, share in zip(models, shares, strict=True))
    what = f"{method} of {', '.join(terms)}"
    settings: dict[str, object] = {"method": method, "weights": shares}
    if how.thin:
        what += f"; differences from {origin.where}, density {density:g}, seed {seed}"
        about_base = {"where": origin.where, "sha256": origin.digest()}
        settings |= {"density": density, "seed": seed, "base": about_base}
        thin = partial(_thinned, how.thin, density, seed)
        compute = partial(_from_base, models, shares, origin, how.mix, thin)
    else:
        compute = partial(_direct, models, shares, how.mix)
    step = merge_step(models, shares, what, evidence=evidence, details=settings)
    tensors = {name: partial(compute, name) for name in models[0].weights}
    return models[0].derive(DerivedWeights(models[0].weights, tensors), step=step)


def _with_all_labels(models: Sequence[Model], base: Model) -> list[Model]:
    """The models and their base, which may be one of them."""
    filled = with_all_labels(models)
    at = next((number for number, model in enumerate(models) if model is base), None)
    return [*filled, base if at is None else filled[at]]


def normalised_weights(models: Sequence[Model], weights: Sequence[float] | None) -> list[float]:
    """One weight per model, equal unless given; scaled to sum to one, with a warning."""
    if weights is None:
        return [1 / len(models)] * len(models)
    if len(weights) != len(models):
        raise MismatchError(
            f"{len(models)} models but {len(weights)} weights: give one weight per model"
        )
    negative = [
        f"{weight:g} for {model.where}"
        for model, weight in zip(models, weights, strict=True)
        if not 0 <= weight < math.inf
    ]
    if negative:
        raise MismatchError(f"weights {', '.join(negative)}: a weight is a number, 0 or larger")
    total = sum(weights)
    if total == 0:
        raise MismatchError("all weights are 0: give at least one model a weight")
    if abs(total - 1) <= SUMS_TO_ONE:
        return list(weights)
    shares = [weight / total for weight in weights]
    warnings.warn(
        f"the weights sum to {total:g}, not 1: scaled to"
        f" {', '.join(f'{share:.4g}' for share in shares)}",
        SymmergeWarning,
        stacklevel=3,
    )
    return shares


def method_for(
    name: str, models: Sequence[Model], base: Model | None, density: float
) -> CombineMethod:
    """A method by name; refused where it does not fit the models and options."""
    if name not in METHODS:
        raise MismatchError(f"method {name}: choose one of {', '.join(METHODS)}")
    method = METHODS[name]
    count, most = len(models), method.max_models
    if count < 2:
        raise MismatchError(f"{count} models: there is nothing to combine; give two or more")
    if most and count > most:
        raise MismatchError(
            f"{count} models: {name} takes {most}; combine {most} at a time, or all by mean"
        )
    if base is not None and not method.thin:
        differing = " or ".join(other for other, one in METHODS.items() if one.thin)
        raise MismatchError(
            f"base {base.where}: {name} does not use differences from a base;"
            f" leave it out or use {differing}"
        )
    if method.thin and not 0 < density <= 1:
        raise MismatchError(
            f"density {density:g}: give the share of differences to keep, above 0 and at most 1"
        )
    return method


def _direct(models: Sequence[Model], shares: Sequence[float], mix: Mix, name: str) -> Tensor:
    return mix((model.weights[name] for model in models), shares)


def _from_base(
    models: Sequence[Model],
    shares: Sequence[float],
    base: Model,
    mix: Mix,
    thin: Callable[[Tensor, int, str], Tensor],
    name: str,
) -> Tensor:
    origin = base.weights[name]

    def differences() -> Iterator[Tensor]:
        for number, model in enumerate(models):
            # The base is already loaded: its difference from itself is zero.
            if model is base:
                yield torch.zeros_like(origin)
            else:
                yield thin(model.weights[name].to(origin) - origin, number, name)

    return (origin + mix(differences(), shares)).to(working(models[0].weights.dtype(name)))


def _thinned(
    thin: Thin, density: float, seed: int, difference: Tensor, number: int, name: str
) -> Tensor:
    return thin(difference, density, generator_for(seed, number, name))


def generator_for(seed: int, number: int, name: str) -> torch.Generator:
    """A seed per model and tensor, so that the order of reading does not matter."""
    key = hashlib.sha256(f"{seed} {number} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
