"""Linear assignment at scale, with a proof: sparse candidates, priced against the dense scores.

A permutation is optimal if prices of columns exist at which every row gets its best column. So:
1. keep the few best entries of each row and column, at the current prices;
2. solve this sparse assignment exactly, and find prices that prove it optimal (Bellman-Ford);
3. one pass over the dense scores finds entries that are better at these prices: add them, repeat.
What is left is a bound on the gain of every other permutation: the gap. Dense passes run on the
device of the scores, the sparse solver on the CPU: 0.01 s of 0.2 s for 3,072 units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from symmerge.errors import OVERFLOW, SymmetryError
from symmerge.symmetry.groups.linalg import one_thread, threads_like_this

CANDIDATES = 16  # entries kept per row and per column
# Costs are rounded to so many levels, finer as the gap shrinks. scipy's sparse solver takes time
# in proportion to the levels on hard problems: in float64 one of rank 1 ran for minutes.
LEVELS = 1 << 20
ROUNDS = 16  # 2 to 6 on the instances of benchmarks/assign.py, then the dense solver
TEMPERATURES = 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001  # in standard deviations of scores
SOFT_STEPS = 4  # at each temperature
CPU_CHUNK, GPU_CHUNK = 1 << 17, 1 << 25  # entries per step: 1 MB in the cache, 0.3 GB
# Problems side by side. 16 x 3,072 on 16 cores: 2.7 s with 4 threads, 3.7 to 8.1 s with 8 or 16
# (the sparse solver holds the GIL); on an H200 1.2 s with 1 or 4.
CPU_THREADS, GPU_THREADS = 4, 1
EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Assignment:
    """Permutations with the largest total scores, on the CPU.

    The prices prove that no permutation scores more than `gap` above `index`. `exact` says that
    this is at most n * 1e-12 * the largest distance of a score from the best of its row (at the
    first prices), or, for scores far from zero, n * 20 roundings of the largest score.
    """

    index: Int[Tensor, "*batch n"]
    prices: Float[Tensor, "*batch n"]
    gap: Float[Tensor, "*batch"]
    exact: Bool[Tensor, "*batch"]


def solve_assignments(
    score: Float[Tensor, "*batch n n"], prices: Float[Tensor, "*batch n"] | None = None
) -> Assignment:
    """Maximise total scores, starting from the prices of similar problems if there are any."""
    n, batch = score.shape[-1], score.shape[:-2]
    blocks = list(score.detach().reshape(-1, n, n))
    starts = [None] * len(blocks) if prices is None else list(prices.reshape(-1, n))
    solved = in_threads(_solve, blocks, starts, most=GPU_THREADS if score.is_cuda else CPU_THREADS)
    index, new_prices, gap, exact = (list(part) for part in zip(*solved, strict=True))
    return Assignment(
        torch.stack(index).reshape(*batch, n),
        torch.stack(new_prices).reshape(*batch, n),
        torch.tensor(gap, dtype=torch.float64).reshape(batch),
        torch.tensor(exact).reshape(batch),
    )


def dense_assignment(score: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """scipy's solver, without a proof: the fastest for a thousand rows and fewer."""
    from scipy.optimize import linear_sum_assignment  # large, and only needed here

    # Subtracting row and column means keeps the optimum and cuts the solver's time to a quarter.
    score = score.detach().double()
    score = score - score.mean(-1, keepdim=True) - score.mean(-2, keepdim=True)
    if not score.isfinite().all():
        raise SymmetryError(f"in an assignment of {len(score)} coordinates, {OVERFLOW}")
    return torch.as_tensor(linear_sum_assignment(score.cpu().numpy(), maximize=True)[1])


def gap_at(
    score: Float[Tensor, "n n"], index: Int[Tensor, " n"], prices: Float[Tensor, " n"]
) -> float:
    """An upper bound on what any permutation gains over this one, from prices of any origin."""
    index, prices = index.to(score.device), prices.to(score.device)
    return float((_best(score, prices) - _own(score, index, prices)).sum())


def in_threads(
    solve: Callable[..., Any], *arguments: Sequence[Any], most: int | None = None
) -> list[Any]:
    """One call per problem, side by side, each in one thread: nothing spins on a busy machine."""
    threads = min(len(arguments[0]), torch.get_num_threads(), most or len(arguments[0]))
    with one_thread():
        if threads <= 1:
            return [solve(*each) for each in zip(*arguments, strict=True)]
        with threads_like_this(threads) as pool:
            return list(pool.map(solve, *arguments))


def _solve(score: Tensor, prices: Tensor | None) -> tuple[Tensor, Tensor, float, bool]:
    low, high = score.aminmax()
    largest = max(-float(low), float(high))
    if not isfinite(largest):
        raise SymmetryError(f"in an assignment of {len(score)} coordinates, {OVERFLOW}")
    unit = 1.0 if not largest or 1e-100 < largest < 1e100 else largest
    if unit != 1.0:  # differences would overflow or vanish
        score = score.double() / unit
    if prices is not None:
        start = prices.double().to(score.device) / unit
    else:
        start = _soft_prices(score) if score.is_cuda else _means(score)
    columns = ColumnGeneration(score, start, largest / unit)
    columns.solve()
    exact = columns.gap <= columns.limit
    return columns.index.cpu(), columns.prices.cpu() * unit, columns.gap * unit, exact


class ColumnGeneration:
    """One score matrix, its candidates (keys: row * n + column, sorted) and prices of columns."""

    def __init__(self, score: Tensor, prices: Tensor, largest: float) -> None:
        self.score, self.n = score, len(score)
        self.index = torch.arange(self.n, device=score.device)  # any permutation
        self.jitter = _jitter(self.n, largest, score.device)
        spread = self._start(prices)
        self.rounding = 2 * EPSILON * largest or 1.0
        self.limit = self.n * (1e-12 * spread + 10 * self.rounding)

    def _start(self, prices: Tensor) -> float:
        """Take candidates at these prices, and the current permutation."""
        self.prices, self.gap = prices, inf
        self.best, keys, spread = _first_candidates(self.score, prices, self.jitter)
        now = torch.arange(self.n, device=prices.device) * self.n + self.index
        self.keys = torch.cat([now, keys]).unique()
        return spread

    def solve(self) -> None:
        """Find the best permutation: the gap proves it, or the dense solver found it."""
        for step in range(ROUNDS):
            self._match()
            better = self._price()
            if self.gap <= self.limit:
                return
            self.keys = torch.cat([self.keys, better]).unique()
            if step == 0 and len(better) > self.n // 4:  # the first prices were bad
                self._start(_soft_prices(self.score))
        self.index = dense_assignment(self.score).to(self.score.device)
        self.gap = gap_at(self.score, self.index, self.prices)

    def _match(self) -> None:
        """The exact optimum of rounded scores of the candidates, and prices that prove it."""
        rows, columns = self.keys // self.n, self.keys % self.n
        cost = self.best[rows] + self.prices[columns] - self.score[rows, columns].double()
        # No entry that costs more than the gap is part of a better permutation.
        kept = (cost <= self.gap) | (self.index[rows] == columns)
        rows, columns, cost = rows[kept], columns[kept], cost[kept]
        unit = max(float(cost.max()) / LEVELS, self.rounding)
        cost = (cost / unit).round()
        index = _sparse_solver(rows, columns, cost, self.index)
        own = torch.empty_like(self.prices)
        matched = index[rows] == columns
        own[rows[matched]] = cost[matched]
        self.prices = self.prices + unit * _proving_prices(index[rows], columns, own[rows] - cost)
        self.index = index

    def _price(self) -> Tensor:
        """Find the gap at the current prices; keys of what beats all candidates of a row."""
        rows, columns = self.keys // self.n, self.keys % self.n
        known = self.score[rows, columns].double() - self.prices[columns]
        known = torch.full_like(self.prices, -inf).scatter_reduce(0, rows, known, "amax")
        self.best = _best(self.score, self.prices)
        self.gap = float((self.best - _own(self.score, self.index, self.prices)).sum())
        keys = [self.keys[:0]]
        for rows in (self.best > known).nonzero()[:, 0].split(_step(self.score)):
            block = self.score[rows].double() - self.prices
            better = block > known[rows, None]
            block += self.jitter[rows]
            at, columns = (better & (block >= _kth(block))).nonzero(as_tuple=True)
            keys.append(rows[at] * self.n + columns)
        return torch.cat(keys)


def _means(score: Tensor) -> Tensor:
    """Prices to start from: enough where no unit stands out."""
    return score.mean(0, dtype=torch.float64)


def _soft_prices(score: Tensor) -> Tensor:
    """Prices at which every column is wanted about once, softly: Sinkhorn, cooled."""
    prices = _means(score)
    sample = score[:: max(1, len(score) // 64)].double() - prices
    width = float(sample.std(1, correction=0).mean())
    for temperature in TEMPERATURES if width else ():
        unit = temperature * width
        for _ in range(SOFT_STEPS):
            wanted = torch.zeros_like(prices)
            for _, block in _chunks(score, prices):
                wanted += (block / unit).float().softmax(1).sum(0)
            prices = prices + unit * wanted.clamp_min(1e-30).log()
    return prices


def _jitter(n: int, largest: float, device: torch.device) -> Float[Tensor, "n n"]:
    """Breaks ties between candidates, differently in each row: without memory, a view."""
    values = torch.rand(2 * n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (values * 1e-12 * largest).to(device).unfold(0, n, 1)[:n]


def _own(score: Tensor, index: Tensor, prices: Tensor) -> Tensor:
    """What each row gets, after its price."""
    rows = torch.arange(len(index), device=score.device)
    return score[rows, index].double() - prices[index]


def _best(score: Tensor, prices: Tensor) -> Tensor:
    """The best that each row could get."""
    return torch.cat([block.amax(1) for _, block in _chunks(score, prices)])


def _step(score: Tensor) -> int:
    """Rows per chunk: a power of two, so that chunks and strided parts of rows fit."""
    entries = GPU_CHUNK if score.is_cuda else CPU_CHUNK
    return 1 << max(1, entries // len(score)).bit_length() - 1


def _chunks(score: Tensor, prices: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time, less prices, in float64."""
    for start in range(0, len(score), _step(score)):
        rows = slice(start, start + _step(score))
        yield rows, score[rows].double() - prices


def _kth(block: Tensor, axis: int = 1) -> Tensor:
    """At most the CANDIDATES-th largest along an axis: that of the maxima of strided parts."""
    size = block.shape[axis]
    parts = max(1, size // (4 * CANDIDATES))
    whole = block.narrow(axis, 0, size // parts * parts)
    maxima = whole.unflatten(axis, (parts, -1)).amax(axis)
    kept = min(CANDIDATES, maxima.shape[axis])
    return maxima.topk(kept, axis).values.narrow(axis, kept - 1, 1)


def _first_candidates(
    score: Tensor, prices: Tensor, jitter: Tensor
) -> tuple[Tensor, Tensor, float]:
    """The best value of each row, keys of candidates, and the largest distance from the best."""
    best, row_cuts, least = [], [], []
    maxima = score.new_full((4 * CANDIDATES, len(score)), -inf, dtype=torch.float64)
    for rows, block in _chunks(score, prices):
        best.append(block.amax(1, keepdim=True))
        least.append((block.amin(1, keepdim=True) - best[-1]).min())
        block += jitter[rows] - best[-1]
        row_cuts.append(_kth(block))
        for part in block.split(len(maxima)):  # strided parts of rows, as in `_kth`
            strided = maxima[rows.start % len(maxima) :][: len(part)]
            torch.maximum(strided, part, out=strided)
    column_cuts = _kth(maxima[: len(score)], 0)
    keys = []
    for (rows, block), top, cut in zip(_chunks(score, prices), best, row_cuts, strict=True):
        block += jitter[rows] - top
        at, columns = (block >= cut.minimum(column_cuts)).nonzero(as_tuple=True)
        keys.append((at + rows.start) * len(score) + columns)
    return torch.cat(best)[:, 0], torch.cat(keys), -float(torch.stack(least).min())


def _sparse_solver(rows: Tensor, columns: Tensor, cost: Tensor, known: Tensor) -> Tensor:
    """The cheapest permutation; a known one among the entries shows that there are any.

    Known entries come first in their rows, so that scipy's own search for a permutation ends at
    once: it takes exponential time on chains (scipy/scipy#26147).
    """
    from scipy.sparse import csr_array  # large, and only needed here
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    n = len(known)
    order = (2 * rows + (known[rows] != columns)).argsort(stable=True)
    offsets = np.searchsorted(rows.cpu().numpy(), np.arange(n + 1)).astype(np.int32)
    # One more than the cost: scipy drops zeros.
    entries = cost[order].cpu().numpy() + 1, columns[order].int().cpu().numpy(), offsets
    index = min_weight_full_bipartite_matching(csr_array(entries, shape=(n, n)))[1]
    return torch.as_tensor(index, dtype=torch.int64, device=cost.device)


def _proving_prices(start: Tensor, end: Tensor, gain: Tensor) -> Tensor:
    """Prices with prices[end] >= prices[start] + gain: midway between two extremes."""
    return (_longest_paths(start, end, gain) - _longest_paths(end, start, gain)) / 2


def _longest_paths(start: Tensor, end: Tensor, gain: Tensor) -> Tensor:
    """The longest path to each node: Bellman-Ford, all edges at once. Gains are whole numbers."""
    order = end.argsort()
    rise = _rise_on_gpu if gain.is_cuda else _rise_on_cpu
    lengths = torch.zeros(int(end.max()) + 1, dtype=torch.float64, device=gain.device)
    for longer in rise(start[order], end[order], gain[order], lengths):
        if torch.equal(longer, lengths):
            break
        lengths = longer
    return lengths


def _rise_on_gpu(start: Tensor, end: Tensor, gain: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    while True:
        lengths = lengths.scatter_reduce(0, end, lengths[start] + gain, "amax")
        yield lengths


def _rise_on_cpu(start: Tensor, end: Tensor, gain: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """A third of the time of scatter_reduce, in one thread."""
    begins, offsets = start.numpy(), np.searchsorted(end.numpy(), np.arange(len(lengths)))
    gains, now = gain.numpy(), lengths.numpy()
    while True:
        now = np.maximum(now, np.maximum.reduceat(np.take(now, begins) + gains, offsets))
        yield torch.from_numpy(now)
