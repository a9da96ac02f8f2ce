"""The test: pairs of units that one half of the weights hardly tells apart, judged by the other.

Units of B are matched to those of A by their incoming weights. Take two matched pairs, (i, j) and
(k, l), that could almost as well be matched crosswise. Do the *outgoing* weights agree with the
match, or would they rather swap j and l? If B knows nothing of A, either is as likely: a fair coin
for every two pairs (docs/kinship.md states the theorem and its condition).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from scipy.stats import binom
from torch import Tensor

RIDGE = 0.1  # of the mean variance: directions below it are not blown up


class Coins(NamedTuple):
    """How many of the pairs agree; equal scores count half."""

    wins: float
    pairs: int


def unit_rows(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Directions alone: lengths of units agree in all models of a kind."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)


def whitened(
    a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """Both without mean, and with equal variance in all directions.

    What all units share (a common mean, a few strong directions) is learned anew by every run.
    """
    a, b = (unit_rows(side) for side in (a, b))
    a, b = (side - side.mean(0) for side in (a, b))
    covariance = (a.mT @ a + b.mT @ b) / (len(a) + len(b))
    values, vectors = torch.linalg.eigh(covariance)
    ridge = RIDGE * values.mean().clamp_min(1e-30)
    root = vectors * (values.clamp_min(0) + ridge).rsqrt()
    return unit_rows(a @ root), unit_rows(b @ root)


def near_ties(score: Float[Tensor, "n n"], most: int) -> Int[Tensor, "pairs 2"]:
    """Disjoint pairs of matched units, those first that lose least if they are swapped."""
    own = score.diagonal()
    gap = own[:, None] + own[None] - score - score.mT
    n = len(gap)
    gap.fill_diagonal_(torch.inf)
    chosen: list[Tensor] = []
    drawn = 0
    while drawn < most:
        best, partner = gap.min(1)
        places = torch.arange(n)
        mutual = (partner[partner] == places) & (places < partner) & best.isfinite()
        first = places[mutual]
        if not len(first):
            break
        chosen.append(
            torch.stack(
                [
                    first,
                    partner[first],
                ],
                1,
            )[best[first].argsort()]
        )
        drawn += len(first)
        taken = chosen[-1].flatten()
        gap[taken] = torch.inf
        gap[:, taken] = torch.inf
    return torch.cat(chosen)[:most] if chosen else torch.empty(0, 2, dtype=torch.long)


def toss(score: Float[Tensor, "n n"], pairs: Int[Tensor, "pairs 2"]) -> Coins:
    """How often the held-out scores prefer a pair as it is matched over its swap."""
    i, k = pairs.unbind(1)
    gain = score[i, i] + score[k, k] - score[i, k] - score[k, i]
    wins = (gain > 0).sum() + 0.5 * (gain == 0).sum()
    return Coins(float(wins), len(pairs))


def p_value(coins: Coins, draw: float) -> float:
    """The probability of as many wins by fair coins.

    Wins are few whole numbers: `draw`, uniform in [0, 1), makes the p-value uniform as well.
    """
    wins = int(coins.wins)
    at, above = binom.pmf(wins, coins.pairs, 0.5), binom.sf(wins, coins.pairs, 0.5)
    return float(above + draw * at)
