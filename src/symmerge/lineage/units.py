"""The units of every layer, their incoming and outgoing weights, and the two tests on them.

| test | what is swapped | null |
|---|---|---|
| `compare_units` | outgoing weights of units that incoming ones hardly tell apart | nearly exact |
| `compare_order` | the numbers of two units of B as it is stored | exact |

docs/kinship.md states both theorems. Only the first sees through a disguise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy.stats import chi2
from torch import Tensor

from symmerge.lineage.disguise import Undisguised, unit_spaces
from symmerge.lineage.swaps import Coins, near_ties, p_value, toss, unit_rows, whitened
from symmerge.models.model import Model
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Spec

SHARE, MOST = 8, 32  # pairs of a layer: one in so many units, at most so many
SMALLEST_P = 1e-300  # logarithms must stay finite
FAINT = 1e-4  # of the usual length of a row: a shorter one is dead


class UnitRows(NamedTuple):
    """The weights of a layer's units: what they read and what they write."""

    incoming: Float[Tensor, "units inputs"]
    outgoing: Float[Tensor, "units outputs"]


@dataclass(frozen=True)
class LayerTest:
    """The test of one layer."""

    space: str
    coins: Coins
    p: float


def rows_of(model: Model, spec: Spec, space: str) -> UnitRows:
    """The units of a space, gates first; each matrix is scaled to rows of mean length one."""
    incoming = [
        matrix
        for role in (Role.RIDES, Role.WRITES)
        for matrix in _matrices(model, spec, space, role)
    ]
    return UnitRows(
        torch.cat(incoming, 1), torch.cat([*_matrices(model, spec, space, Role.READS)], 1)
    )


def _matrices(
    model: Model, spec: Spec, space: str, role: Role
) -> Iterator[Float[Tensor, "units others"]]:
    for met in spec.occurrences(space):
        if met.role is role and len(met.piece.atoms) > 1:
            view = met.piece.view(model.weights[met.piece.tensor])
            matrix = view.movedim(met.position, 0).reshape(spec.sizes[space], -1).float()
            yield matrix / matrix.square().sum(1).mean().sqrt().clamp_min(1e-30)


def alive(*rows: UnitRows) -> Tensor:
    """Units that read and write something in all models: widened models have dead ones."""
    lengths = torch.stack([side.norm(dim=1) for units in rows for side in units])
    return (lengths > FAINT * lengths.amax(1, keepdim=True)).all(0)


def test_rows(a: UnitRows, b: UnitRows) -> Coins:
    """The test of matched units: unit i of B is matched to unit i of A."""
    live = alive(a, b)
    if live.sum() < 2:
        return Coins(0.0, 0)
    a, b = (UnitRows(*(side[live] for side in units)) for units in (a, b))
    score = unit_rows(a.incoming) @ unit_rows(b.incoming).mT
    pairs = near_ties(score, min(MOST, max(1, len(score) // SHARE)))
    x, y = whitened(a.outgoing, b.outgoing)
    return toss(x @ y.mT, pairs)


def compare_units(pair: Undisguised, key: str) -> tuple[LayerTest, ...]:
    """Every layer: do outgoing weights agree with the match of the incoming ones?"""
    return tuple(
        layer_test(
            space,
            test_rows(*(rows_of(m, pair.spec, space) for m in (pair.reference, pair.aligned))),
            key,
        )
        for space in unit_spaces(pair.spec)
    )


def compare_order(a: Model, b: Model, key: str) -> LayerTest | None:
    """Do units of two models, as they are stored, agree in their numbers? None: not comparable."""
    if a.spec.fingerprint != b.spec.fingerprint or not unit_spaces(a.spec):
        return None
    wins, pairs = 0.0, 0
    for space in unit_spaces(a.spec):
        sides = (rows_of(model, model.spec, space) for model in (a, b))
        x, y = (torch.cat([unit_rows(rows) for rows in side], 1) for side in sides)
        half = len(x) // 2
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        gain = ((x[first] - x[second]) * (y[first] - y[second])).sum(1)
        wins += float((gain > 0).sum() + 0.5 * (gain == 0).sum())
        pairs += half
    return layer_test("order", Coins(wins, pairs), key)


def layer_test(space: str, coins: Coins, key: str) -> LayerTest:
    """With its p-value, made exactly uniform by a draw that only the two checkpoints determine."""
    return LayerTest(space, coins, p_value(coins, _draw(key, space)))


def _draw(key: str, what: str) -> float:
    digest = hashlib.sha256(f"{key} {what}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def combined(tests: Sequence[LayerTest]) -> float:
    """Fisher's combination of independent p-values: one related layer among many is enough."""
    values = [max(test.p, SMALLEST_P) for test in tests if test.coins.pairs]
    return float(chi2.sf(-2 * sum(map(log, values)), 2 * len(values))) if values else 1.0


def by_layer(tests: Sequence[LayerTest]) -> Mapping[str, LayerTest]:
    """The tests by their space."""
    return {test.space: test for test in tests}
