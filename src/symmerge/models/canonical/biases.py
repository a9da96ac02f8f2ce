"""Biases inside attention: value biases move to the output map, key biases are dropped."""

from __future__ import annotations

import string
from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.models.canonical.step import Computed, derived
from symmerge.models.circuits import piece_of
from symmerge.models.model import Model
from symmerge.symmetry.groups import (
    RotaryPairs,
)
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Occurrence, Spec


def move_value_biases(model: Model) -> Model:
    """Attention weights sum to one, so a constant on the values is a constant after the output map."""
    computed: Computed = {}
    for name, space in model.spec.hidden.items():
        if space.translation != "passes" or isinstance(
            space.group, RotaryPairs
        ):  # turned with the position, it is no constant
            continue
        biases = [
            met
            for met in model.spec.occurrences(name)
            if met.role is Role.WRITES and _is_bias(met, model.spec)
        ]
        for output in (met for met in model.spec.occurrences(name) if met.role is Role.READS):
            target = output.piece.tensor.removesuffix("weight") + "bias"
            if target not in model.spec.tensors or not any(
                piece_of(bias, model.weights).any() for bias in biases
            ):
                continue
            computed[target] = partial(_with_values, model, target, name, tuple(biases))
            computed |= {
                bias.piece.tensor: partial(_zeroed, model.weights, bias, 0) for bias in biases
            }
    return derived(
        model,
        computed,
        "values",
        f"value biases moved into the output bias of {len(computed) // 2} layers",
    )


def drop_key_biases(model: Model) -> Model:
    """A constant on every key adds the same to all scores of a query, and the softmax does not see it; rotary coordinates differ."""
    computed: Computed = {}
    for name, space in model.spec.hidden.items():
        if space.translation != "drops":
            continue
        start = space.group.rotary if isinstance(space.group, RotaryPairs) else 0
        if start == space.group.size:
            continue
        for met in model.spec.occurrences(name):
            if (
                met.role is Role.READS
                and _is_bias(met, model.spec)
                and piece_of(met, model.weights).any()
            ):
                computed[met.piece.tensor] = partial(_zeroed, model.weights, met, start)
    return derived(
        model,
        computed,
        "keys",
        f"key biases of {len(computed)} layers set to zero where positions do not rotate them",
    )


def _is_bias(met: Occurrence, spec: Spec) -> bool:
    return len(spec.tensors[met.piece.tensor]) == 1


def _zeroed(weights: Weights, met: Occurrence, start: int) -> Tensor:
    tensor = weights[met.piece.tensor].clone()
    view = met.piece.view(tensor)
    view.narrow(met.position, start, view.shape[met.position] - start).zero_()
    return tensor


def _with_values(model: Model, target: str, space: str, biases: tuple[Occurrence, ...]) -> Tensor:
    bias = model.weights[target].clone()
    outputs = [
        met
        for met in model.spec.occurrences(space)
        if met.role is Role.READS and met.piece.tensor.removesuffix("weight") + "bias" == target
    ]
    for output in outputs:  # one, unless something lies beside the stream
        letters = dict(
            zip((atom.space for atom in output.piece.atoms), string.ascii_lowercase, strict=False)
        )
        into = next(piece for piece in model.spec.pieces[target] if piece.atoms[0].space in letters)
        for value in biases:
            inputs = [
                "".join(letters[atom.space] for atom in met.piece.atoms) for met in (output, value)
            ]
            moved = torch.einsum(
                f"{inputs[0]},{inputs[1]}->{letters[into.atoms[0].space]}",
                piece_of(output, model.weights),
                piece_of(value, model.weights),
            )
            into.view(bias).add_(moved)
    return bias
