"""Are two sets of logits equal up to rounding? Judged per output, place and column.

One norm over all logits hides what changes few of them: a huge logit, a wrong row. Here every logit
is measured in units of its own rounding error, which was measured on the models themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from jaxtyping import Float
from torch import Tensor

Logits = Float[Tensor, "rows columns"]
# The largest difference that counts as rounding, in units of what one rounding does: in the median
# row, in one row, in one entry. Chosen on all families, see docs/log.md.
TYPICAL, ROW, ENTRY = 2.0, 3.0, 10.0
# A column's errors are alike in all rows (they come from one row of the head), so that the largest
# of n columns grows as that of n normal numbers; this is the factor above it.
COLUMN = 1.5
ENOUGH = 16  # rows or columns whose mean is steady
# A column may move alike in all rows; the median of single draws is then this much smaller than
# that of root mean squares of two.
USUAL = {1: 1.23, 2: 1.0}
LEAST = 0.3  # of the typical unit, for rows that hardly move
# Two class scores of two sequences are about two independent numbers: by chance they lie further
# apart than many do. This much further, over their number: once in 10,000 pairs beyond it.
CHANCE = 1.0


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How far two sets of logits differ.

    `difference` is |A - B| / |A|, `rounding` the same for one rounding, `largest` the largest
    absolute difference. `units` compares every logit with rounding: up to 1 it explains all.
    """

    difference: float
    rounding: float
    largest: float
    units: float
    where: str


def judge(
    first: Logits,
    second: Logits,
    noise: Sequence[Logits],
    *,
    softmax: bool,
    what: str,
    typical: bool = False,
) -> Judgement:
    """Compare the logits of two models; `noise` is what single roundings change.

    With `typical`, only the median row counts: in single ones rounding may change everything.
    """
    if not all(logits.isfinite().all() for logits in (first, second, *noise)):
        return Judgement(difference=inf, rounding=0.0, largest=inf, units=inf, where=what)
    apart = centred(first.double() - second.double(), softmax)
    moved = torch.stack([centred(change.double(), softmax) for change in noise])
    size = rms(centred(first.double(), softmax)).clamp_min(torch.finfo(torch.float64).tiny)
    units, where = _units(apart, moved, size, typical)
    units /= 1 + CHANCE / _independent(moved)
    return Judgement(
        difference=(rms(apart) / size).item(),
        rounding=(rms(moved) / size).item(),
        largest=apart.abs().max().item(),
        units=units,
        where=f"{what}, {where}",
    )


def _units(
    apart: Logits, moved: Float[Tensor, "draws rows columns"], size: Tensor, typical: bool
) -> tuple[float, str]:
    """The worst of four comparisons with rounding, and where it is."""
    column = rms(moved, (0, 1))
    # Few draws may miss a column's error: none counts as smaller than is usual.
    usual = rms(column) if len(column) < ENOUGH else column.median() * USUAL[min(len(moved), 2)]
    column = column.clamp_min(usual.maximum(size * torch.finfo(torch.float64).eps))
    relative, noise = apart / column, moved / column
    by_row, noise_by_row = rms(relative, 1), rms(noise, (0, 2))
    row_unit = noise_by_row.clamp_min(1.0)
    scaled = relative / row_unit[:, None]
    entries = scaled.abs().flatten()
    scores = {
        "everywhere": (by_row / noise_by_row.clamp_min(LEAST)).median() / TYPICAL,
        f"entry {_place(entries, apart.shape[1])}": entries.max() / ENTRY,
    }
    if typical:
        return scores["everywhere"].item(), "everywhere"
    if apart.shape[1] >= ENOUGH:
        rows = by_row / row_unit
        scores[f"row {int(rows.argmax())}"] = rows.max() / ROW
    if apart.shape[0] >= ENOUGH:
        columns = rms(scaled, 0)
        expected = (2 * log(len(columns))) ** 0.5
        scores[f"column {int(columns.argmax())}"] = columns.max() / max(ROW, COLUMN * expected)
    where = max(scores, key=lambda name: scores[name].item())
    return scores[where].item(), where


def _independent(moved: Float[Tensor, "draws rows columns"]) -> float:
    """About how many independent numbers rounding moves: if few, draws are nearly parallel."""
    draws = torch.nn.functional.normalize(moved.flatten(1), dim=1)
    parallel = (draws @ draws.mT).square()
    count = len(draws) * (len(draws) - 1)
    if not count:
        return float(moved[0].numel())
    return 1 / max((parallel.sum() - parallel.trace()).item() / count, 1 / moved[0].numel())


def _place(entries: Tensor, columns: int) -> str:
    row, column = divmod(int(entries.argmax()), columns)
    return f"{row}, {column}"


def centred(logits: Tensor, softmax: bool) -> Tensor:
    """Without the constant that a softmax ignores; the median, because one logit may be huge."""
    if not softmax:
        return logits
    few = logits.shape[-1] < ENOUGH
    return logits - (logits.mean(-1, True) if few else logits.median(-1, True).values)


def rms(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """The root of the mean square."""
    return x.square().mean(dim).sqrt()
