"""Balance: give the writers and readers of a space the same norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights
from symmerge.models.canonical.step import Computed, derived
from symmerge.models.circuits import circuit_of, computed_once, with_pieces
from symmerge.models.model import Model
from symmerge.symmetry.groups import GeneralLinear, Group, RotaryPairs, ScaledPermutation, linalg
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Spec

RANK = 64.0  # singular values below so many roundings of the largest are zero
ROUNDS, SETTLED = 100, 1e-13  # of turns, where spaces meet; what a round must gain, relative


def balance(model: Model) -> Model:
    """Where only products matter, give writers and readers the same size; heads get SVD bases."""
    turns = _turns(model.spec)
    if not turns:
        return model
    computed = _balanced(model, turns[0])
    if len(turns) > 1:
        settled = cache(partial(_settled, model, turns))
        names = {name for spaces in turns for name in _balanced(model, spaces)}
        computed = {name: lambda name=name: settled()[name] for name in sorted(names)}
    what = f"writers and readers of {sum(map(len, turns))} spaces balanced"
    return derived(model, computed, "balance", what)


def _turns(spec: Spec) -> list[set[str]]:
    """The spaces that are balanced, apart where two of them meet in one matrix.

    A space that one matrix both reads and writes is no product of two sides, and stays as it is; so
    does one that nothing reads (directions whose length is another parameter).
    """
    turns: list[set[str]] = []
    for name, space in spec.hidden.items():
        if type(space.group) in BALANCE:
            sides = [one for one in spec.occurrences(name) if one.role is not Role.RIDES]
            pieces = [one.piece for one in sides]
            if len(pieces) > len({*pieces}) or len({one.role for one in sides}) < 2:
                continue
            met = {atom.space for piece in pieces for atom in piece.atoms} - {name}
            turn = next((turn for turn in turns if not turn & met), None)
            if turn is None:
                turns.append(turn := set())
            turn.add(name)
    return turns


def _balanced(model: Model, spaces: set[str]) -> Computed:
    pieces, read = computed_once(partial(_balanced_pieces, model)), model.weights.__getitem__
    return {
        occurrence.piece.tensor: partial(
            with_pieces, model.spec, occurrence.piece.tensor, read, pieces, spaces
        )
        for name in spaces
        for occurrence in model.spec.occurrences(name)
        if occurrence.role is not Role.RIDES
    }


def _settled(model: Model, turns: list[set[str]]) -> Mapping[str, Tensor]:
    """Spaces that meet in one matrix change each other's balance: they take turns.

    Each turn lowers the sum of all squares, which has one least value on an orbit.
    """
    balanced: dict[str, Tensor] = {}
    sizes = [inf]
    for _ in range(ROUNDS):
        for spaces in turns:
            known = {name: partial(balanced.__getitem__, name) for name in balanced}
            current = replace(model, weights=DerivedWeights(model.weights, known))
            balanced |= {name: one() for name, one in _balanced(current, spaces).items()}
        sizes.append(sum(one.double().square().sum().item() for one in balanced.values()))
        if sizes[-2] - sizes[-1] <= SETTLED * sizes[-1]:
            break
    return balanced


def _balanced_pieces(model: Model, space: str) -> dict[Piece, Tensor]:
    group, circuit = model.spec.spaces[space].group, circuit_of(model, space)
    x, y = BALANCE[type(group)](group, circuit.x.double(), circuit.y.double())
    return circuit.pieces(x.to(circuit.x), y.to(circuit.y))


Pair = tuple[Float[Tensor, "b n x"], Float[Tensor, "b n y"]]


def balance_circuit(group: Group, x: Float[Tensor, "b n x"], y: Float[Tensor, "b n y"]) -> Pair:
    """Balance x'y = U S V' without forming it: QR of both thin factors, SVD of the core."""
    (x_basis, x_core), (y_basis, y_core) = linalg.qr(x.mT), linalg.qr(y.mT)
    u, s, vh = linalg.svd(x_core @ y_core.mT, full_matrices=False)
    # the root of what is rounding in a circuit of lower rank would be far more than rounding
    s = s * (s > s.amax(-1, True) * (RANK * torch.finfo(s.dtype).eps))
    root = s.sqrt()[..., None]
    padding = (0, 0, 0, x.shape[-2] - s.shape[-1])
    pad = torch.nn.functional.pad
    return pad(root * (x_basis @ u).mT, padding), pad(root * (y_basis @ vh.mT).mT, padding)


def _balance_rows(x: Tensor, y: Tensor) -> Pair:
    x_norm, y_norm = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    ratio = (y_norm / x_norm.clamp_min(1e-300)).sqrt()
    scale = torch.where((x_norm > 0) & (y_norm > 0), ratio, torch.ones_like(ratio))
    return x * scale, y / scale


def _balance_scales(group: Group, x: Tensor, y: Tensor) -> Pair:
    return _balance_rows(x, y)


def _balance_rotary(group: Group, x: Tensor, y: Tensor) -> Pair:
    """Rotary pairs are scaled as a unit; other coordinates are a circuit like any other."""
    assert isinstance(group, RotaryPairs)
    (x_first, x_second, x_rest), (y_first, y_second, y_rest) = group.split(x), group.split(y)
    pairs = torch.cat([x_first, x_second], -1), torch.cat([y_first, y_second], -1)
    (q_first, q_second), (k_first, k_second) = (s.chunk(2, -1) for s in _balance_rows(*pairs))
    if group.rest.size:
        x_rest, y_rest = balance_circuit(group, x_rest, y_rest)
    return group.join(q_first, q_second, x_rest), group.join(k_first, k_second, y_rest)


BALANCE: dict[type[Group], Callable[[Any, Tensor, Tensor], Pair]] = {
    GeneralLinear: balance_circuit,
    ScaledPermutation: _balance_scales,
    RotaryPairs: _balance_rotary,
}
