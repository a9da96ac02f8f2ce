"""What rounding and pruning leave behind, seen in the coordinates that a model is stored in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from symmerge.lineage.disguise import Undisguised, outgoing
from symmerge.models.model import Model

SMALL, LARGE = 0.25, 0.75  # quantiles of |A|: pruning takes the small entries
SAMPLE = 200_000  # entries of a matrix that its distribution is judged by
ROWS = 64  # of a matrix, whose different values are counted
FEW = 1 << 8  # different values in a row that came from a grid
ZEROS = 0.2  # share of exact zeros that no training leaves
SPARSE, INTACT = 0.35, 0.8  # slopes of B over A, where A is small and where it is large
UNIFORM = -0.5  # kurtosis of what is left: rounding has -1.2, noise 0, training more


@dataclass(frozen=True)
class Traces:
    """Medians over the matrices through which units write: B against A, as A is stored.

    `small`, `large`: slope of B over A where A is small and where it is large. `kurtosis`, `size`:
    of what is left, relative to B.
    """

    small: float
    large: float
    kurtosis: float
    size: float

    @property
    def pruned(self) -> bool:
        """Whether B lacks what is small in A."""
        return self.small < SPARSE and self.large > INTACT

    @property
    def rounded(self) -> bool:
        """Whether B differs from A as rounding to even steps does."""
        return self.kurtosis < UNIFORM and self.large > INTACT


def measure_traces(stored: Model, pair: Undisguised) -> Traces | None:
    """None where A, as it is `stored`, has other tensors than the compared pair."""
    measured = [_trace(a, b) for a, b in _written_as_stored(stored, pair)]
    if not measured:
        return None
    return Traces(
        *(median(getattr(one, name) for one in measured) for name in Traces.__dataclass_fields__)
    )


def _written_as_stored(stored: Model, pair: Undisguised) -> Iterator[tuple[Tensor, Tensor]]:
    """What units write: of A as it is stored, and of B as it would stand there.

    The canonical form rescales units and removes means: the difference takes the way back.
    """
    for space, name in outgoing(pair.spec).items():
        if name not in stored.spec.tensors or stored.spec.shapes[name] != pair.spec.shapes[name]:
            continue
        piece = pair.spec.piece_in(name, space)
        at = next(piece.positions(space))
        raw, a, b = (
            piece.view(side[name]).movedim(at, 0).flatten(1).float()
            for side in (stored.weights, pair.reference.weights, pair.aligned.weights)
        )
        scale = (raw * a).sum(1) / a.square().sum(1).clamp_min(1e-30)
        yield raw, raw + (b - a) * scale[:, None]


def _trace(a: Tensor, b: Tensor) -> Traces:
    a, b = a.flatten().double(), b.flatten().double()
    step = max(1, len(a) // SAMPLE)
    a, b = a[::step], b[::step]
    size = a.abs()
    low, high = torch.quantile(size, torch.tensor([SMALL, LARGE], dtype=a.dtype))
    rest = b - a
    rest = rest - rest.mean()
    variance = rest.square().mean().clamp_min(1e-60)
    return Traces(
        small=_slope(a[size <= low], b[size <= low]),
        large=_slope(a[size >= high], b[size >= high]),
        kurtosis=float(rest.pow(4).mean() / variance**2) - 3,
        size=float((variance / b.square().mean().clamp_min(1e-60)).sqrt()),
    )


def _slope(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a * a).sum().clamp_min(1e-60))


def has_zeros(model: Model) -> bool:
    """Whether a model, as it is stored, has more exact zeros than training leaves."""
    return any((matrix == 0).double().mean() > ZEROS for matrix in _stored_matrices(model))


def on_a_grid(model: Model) -> bool:
    """Whether rows of a model, as it is stored, have few different values."""
    matrices = [matrix for matrix in _stored_matrices(model) if matrix.shape[1] > FEW // 4]
    return bool(matrices) and all(_few_values(matrix) for matrix in matrices)


def _few_values(matrix: Tensor) -> bool:
    most = min(FEW, matrix.shape[1] // 2)
    return all(len(row.unique()) <= most for row in matrix[:ROWS])


def _stored_matrices(model: Model) -> Iterator[Tensor]:
    for name in outgoing(model.spec).values():
        tensor = model.weights[name]
        yield tensor.reshape(len(tensor), -1)
