"""Permutations as index tensors: take, compose, sample, check, and linear assignment."""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma, log

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from symmerge.symmetry.groups.assignment import dense_assignment, in_threads, solve_assignments
from symmerge.symmetry.groups.base import Check, Coordinates, Shape, is_transposed

DENSE = 1024  # up to here scipy's dense solver is as fast as the sparse one with its proof


def take(x: Coordinates, index: Int[Tensor, "*#batch n"]) -> Coordinates:
    """Row i of the result is row index[i] of x; a new tensor in the layout of x."""
    index = index.to(x.device)
    if index.ndim == 1 and is_transposed(x):
        return x.mT.gather(-1, index.expand(x.mT.shape)).mT
    if index.ndim == 1:
        return x.index_select(-2, index)
    flat = rearrange(x, "... n m -> (...) n m")
    rows = rearrange(index.expand(x.shape[:-1]), "... n -> (...) n")
    return flat[torch.arange(len(flat), device=x.device)[:, None], rows].reshape(x.shape)


def gather(values: Tensor, index: Tensor) -> Tensor:
    """values[index], along the last axis."""
    return values.gather(-1, index.to(values.device))


def identity_index(n: int, batch: Shape) -> Int[Tensor, "*batch n"]:
    """The identity permutation."""
    return torch.arange(n).expand(*batch, n).clone()


def random_index(n: int, generator: torch.Generator, batch: Shape) -> Int[Tensor, "*batch n"]:
    """A uniformly random permutation."""
    return torch.rand((*batch, n), generator=generator, dtype=torch.float64).argsort(-1)


def log10_factorial(n: int) -> float:
    """log10(n!), the number of permutations."""
    return lgamma(n + 1) / log(10)


def check_index(index: Tensor) -> Check:
    """Whether every index is a permutation."""
    if index.dtype != torch.int64:
        return Check(False, f"index holds {index.dtype}, not int64")
    every = torch.arange(index.shape[-1], device=index.device).expand_as(index)
    if torch.equal(index.sort(-1).values, every):
        return Check(True)
    return Check(False, "index is not a permutation: every coordinate must occur once")


@dataclass
class Prices:
    """Prices of the last assignment: a warm start for the next one, which is similar."""

    last: Float[Tensor, "*batch n"] | None = None


def assign(
    score: Float[Tensor, "*batch n n"], prices: Prices | None = None
) -> Int[Tensor, "*batch n"]:
    """The permutation with the largest total score; `prices` are used and replaced."""
    if score.shape[-1] > DENSE:
        solved = solve_assignments(score, prices.last if prices else None)
        if prices:
            prices.last = solved.prices
        return solved.index
    blocks = list(rearrange(score, "... n m -> (...) n m"))
    return torch.stack(in_threads(dense_assignment, blocks)).reshape(score.shape[:-1])
