"""Pairs with heads of twice the size, in which a straight line averages circuits, not factors.

In a head only two products matter: QK and OV. With both models' factors side by side in one head,
one side of each product in place and the other fading from A's half to B's, the product on the
line is the mean of the products. Exact, but no stock checkpoint: for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights
from symmerge.errors import MismatchError
from symmerge.models.model import INFLATED, Model, inflated
from symmerge.models.tables import check_same_table
from symmerge.symmetry.groups import GeneralLinear, RotaryPairs, Signs
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Spec

Halves = tuple[bool, bool]
"""Whether the halves of a doubled head hold A's and B's factors."""
A_ONLY, B_ONLY, BOTH = (True, False), (False, True), (True, True)


def circuit_spaces(model: Model) -> set[str]:
    """Spaces inside heads with the full GL symmetry; rotary ones are excluded."""
    return {
        name
        for name, space in model.spec.spaces.items()
        if space.per and isinstance(space.group, GeneralLinear)
    }


def has_circuits(model: Model) -> bool:
    """Whether queries and keys, values and outputs meet in one matrix each."""
    turns = any(
        isinstance(space.group, RotaryPairs | Signs) for space in model.spec.spaces.values()
    )
    return bool(circuit_spaces(model)) and not turns


def check_circuits(model: Model) -> None:
    """Refuse models whose circuit is not one matrix."""
    if not has_circuits(model):
        raise MismatchError(
            f"queries and keys of {model.spec.family} turn with their positions, so their circuit"
            " is not one matrix: average attention by factors or svd, not by circuits"
        )


def circuit_ends(a: Model, b: Model, original: Model | None = None) -> tuple[Model, Model]:
    """The pair with doubled heads: the straight line between them is that of the circuits.

    `original` is a model of the pair before bases inside heads were fixed, if they were.
    """
    return _pair(a, b, original or a, ({Role.READS: A_ONLY}, {Role.READS: B_ONLY}))


def separate_heads(a: Model, b: Model) -> tuple[Model, Model]:
    """The pair with doubled heads, each model in a half of its own; the bases inside stay.

    The mean of both has the mean of the circuits if `CircuitFactors` are applied to it.
    """
    kinds = {name.partition(".")[0]: "identity" for name in circuit_spaces(a)}
    wide = _pair(a, b, a, (dict.fromkeys(Role, A_ONLY), dict.fromkeys(Role, B_ONLY)))
    return wide[0].restrict(**kinds), wide[1].restrict(**kinds)


def _pair(
    a: Model, b: Model, original: Model, halves: tuple[Mapping[Role, Halves], Mapping[Role, Halves]]
) -> tuple[Model, Model]:
    check_same_table([a, b])
    check_circuits(original)
    spaces = circuit_spaces(original)
    spec = inflated(a.spec, spaces)
    return _doubled(a, b, 0, spec, spaces, halves[0]), _doubled(a, b, 1, spec, spaces, halves[1])


def _doubled(
    a: Model, b: Model, end: int, spec: Spec, spaces: set[str], halves: Mapping[Role, Halves]
) -> Model:
    model = (a, b)[end]
    compute = {
        name: partial(_side_by_side, a, b, end, name, spec, spaces, halves)
        for name in a.spec.tensors
    }
    added = {name: (spec.shapes[name], model.weights.dtype(name)) for name in a.spec.tensors}
    weights = DerivedWeights(MemoryWeights({}), compute, added=added)
    step = HistoryStep("double", "heads of twice the size, for the mean of circuits")
    config = {**model.config, INFLATED: True}
    return replace(model.derive(weights, step=step), spec=spec, config=config)


def _side_by_side(
    a: Model,
    b: Model,
    end: int,
    name: str,
    spec: Spec,
    spaces: set[str],
    halves: Mapping[Role, Halves],
) -> Tensor:
    """One tensor of an end: both factors, one or the other where it meets a head's inside."""
    sides = a.weights[name], b.weights[name]
    result = torch.empty(spec.shapes[name], dtype=sides[end].dtype)
    for small, large in zip(a.spec.pieces[name], spec.pieces[name], strict=True):
        views = [small.view(side) for side in sides]
        inside = [position for position, atom in enumerate(small.atoms) if atom.space in spaces]
        if not inside:
            large.view(result).copy_(views[end])
            continue
        (position,) = inside
        keep = halves.get(small.atoms[position].role, BOTH)
        parts = [
            view if kept else torch.zeros_like(view) for view, kept in zip(views, keep, strict=True)
        ]
        large.view(result).copy_(torch.cat(parts, position))
    return result
