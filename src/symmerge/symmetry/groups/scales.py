"""The best scale of a pair of hidden units: writers times s, readers divided by s."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symmerge.symmetry.groups.base import Gram

# So that a handful of float32 arrays fit in the cache; on a GPU, few launches and 0.3 GB each.
CPU_BLOCK, GPU_BLOCK = 1 << 16, 1 << 26
NEWTON_STEPS = 9
MAX_LOG_SCALE = 12.0  # a unit scaled by e^12 would not survive float16; the gate would refuse it
TINY = torch.finfo(torch.float32).tiny


class Pairs(NamedTuple):
    """Products of units: A writes a and reads c, B writes b and reads d."""

    bb: Tensor
    dd: Tensor
    ab: Tensor
    cd: Tensor

    def cost(self, s: Tensor) -> Tensor:
        """|a - s b|^2 + |c - d / s|^2, less |a|^2 + |c|^2."""
        return s * (s * self.bb - 2 * self.ab) + (self.dd / s - 2 * self.cd) / s


def pairs_at(index: Int[Tensor, "*batch n"], write: Gram, read: Gram | None) -> Pairs:
    """The pairs (i, index[i])."""
    bb, ab = squares_at(index, write), products_at(index, write)
    if read is None:
        return Pairs(bb, torch.zeros_like(bb), ab, torch.zeros_like(ab))
    return Pairs(bb, squares_at(index, read), ab, products_at(index, read))


def squares_at(index: Tensor, gram: Gram) -> Tensor:
    """Squared norms of B's units."""
    return gram.needs_squares().gather(-1, index)


def products_at(index: Tensor, gram: Gram) -> Tensor:
    """Inner products of A's units with B's, for the pairs (i, index[i])."""
    return gram.cross.gather(-1, index[..., None]).squeeze(-1)


def scale_costs(write: Gram, read: Gram, positive: bool) -> Float[Tensor, "*batch n n"]:
    """Cost of the best scale for every pair of units, to about one part in a thousand.

    With B's units balanced (writer and reader of equal norm) the best scale of nearly every pair
    is close to 1 or -1, and one Newton step in its logarithm finds it. The few other pairs get the
    full search.
    """
    bb, dd = (gram.needs_squares()[..., None, :] for gram in (write, read))
    balance = (dd.clamp_min(TINY) / bb.clamp_min(TINY)).pow(0.25).float()
    length = (bb * dd).sqrt().float()
    cost = torch.empty_like(write.cross, dtype=torch.float32)
    for rows in _row_blocks(cost):
        ab, cd = write.cross[rows].float().mul_(balance), read.cross[rows].float().div_(balance)
        block, uncertain = _newton_costs(ab, cd, length, positive)
        if uncertain.any():
            sides = (bb, dd, write.cross, read.cross)
            pairs = Pairs(*(side.expand_as(cost)[rows][uncertain] for side in sides))
            block[uncertain] = pairs.cost(best_scale(pairs, positive)).float()
        cost[rows] = block
    return cost


def _row_blocks(pairs: Tensor) -> Iterator[tuple]:
    """A few rows at a time, so that the work stays in the cache."""
    n = pairs.shape[-1]
    block = GPU_BLOCK if pairs.is_cuda else CPU_BLOCK
    rows = max(1, block // (n * max(1, pairs.numel() // n**2)))
    return ((..., slice(at, at + rows), slice(None)) for at in range(0, n, rows))


def _newton_costs(ab: Tensor, cd: Tensor, length: Tensor, positive: bool) -> tuple[Tensor, Tensor]:
    """Costs of balanced pairs after one Newton step, and which pairs need the full search."""
    both, apart = ab + cd, ab - cd
    # The cost need not be convex there.
    uncertain = torch.maximum(both.abs(), apart.abs()) > 3 * length
    if not positive:
        sign = both.sign()
        both, apart = both.mul_(sign), apart.mul_(sign)
    uncertain |= apart.abs() > length
    step = apart / (4 * length - both).abs_().clamp_min_(TINY)
    s = step.clamp_(-1, 1).exp_()
    inverse = s.reciprocal()
    # 2 (ab s + cd / s), from the sum and the difference of ab and cd
    linear = (s + inverse).mul_(both).add_((s - inverse).mul_(apart))
    return (s.square() + inverse.square()).mul_(length).sub_(linear), uncertain


def best_scale(pairs: Pairs, positive: bool) -> Tensor:
    """The scale with the least cost: Newton steps in log |s|, from the best of three starts."""
    tiny = torch.finfo(pairs.ab.dtype).tiny
    s, sign, start_cost = _best_start(pairs, positive)
    pairs = pairs._replace(ab=sign * pairs.ab, cd=sign * pairs.cd)
    t, start = s.log(), s
    for _ in range(NEWTON_STEPS):
        inverse = 1 / s
        up, down = s * s * pairs.bb, inverse * inverse * pairs.dd
        linear, reciprocal = s * pairs.ab, inverse * pairs.cd
        gradient = 2 * (up - linear - down + reciprocal)
        curvature = 4 * (up + down) - 2 * (linear + reciprocal)
        t = t - (gradient / curvature.abs().clamp_min(tiny)).clamp(-1, 1)
        t = t.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE)
        s = t.exp()
    return sign * torch.where(pairs.cost(s) <= start_cost, s, start)


def _best_start(pairs: Pairs, positive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The best |s| of three (balanced, best for writers, best for readers), its sign and cost."""
    tiny = torch.finfo(pairs.ab.dtype).tiny
    bb, dd = pairs.bb.clamp_min(tiny), pairs.dd.clamp_min(tiny)
    balanced = (dd / bb).pow(0.25).expand_as(pairs.ab)
    best, s = torch.full_like(pairs.ab, torch.inf), torch.ones_like(pairs.ab)
    sign = torch.ones_like(pairs.ab)
    for start in (balanced, pairs.ab.abs() / bb, dd / pairs.cd.abs().clamp_min(tiny)):
        start = start.clamp(exp(-MAX_LOG_SCALE), exp(MAX_LOG_SCALE))
        for direction in (1.0,) if positive else (1.0, -1.0):
            flipped = pairs._replace(ab=direction * pairs.ab, cd=direction * pairs.cd)
            cost = flipped.cost(start)
            better = cost < best
            best, s = torch.where(better, cost, best), torch.where(better, start, s)
            sign = torch.where(better, direction, sign)
    return s, sign, best
