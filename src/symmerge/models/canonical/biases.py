"""Biases inside attention: value biases move to the output map, key biases are dropped."""

from __future__ import annotations

import string
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from symmerge.checkpoints.weights import Weights
from symmerge.models.canonical.step import Computed, derived
from symmerge.models.circuits import read_piece
from symmerge.models.model import Model
from symmerge.symmetry.groups import RotaryPairs
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Occurrence, Spec


def move_value_biases(model: Model) -> Model:
    """Move value biases past the output map: attention weights sum to one, so constants pass."""
    computed: Computed = {}
    for target, name in passing_values(model.spec):
        biases = _biases(model, name, Role.WRITES)
        if any(read_piece(bias, model.weights).any() for bias in biases):
            computed[target] = partial(_with_values, model, target, name)
            computed |= {
                bias.piece.tensor: partial(_zeroed, model.weights, bias, 0) for bias in biases
            }
    what = f"value biases moved into the output bias of {len(computed) // 2} layers"
    return derived(model, computed, "values", what)


def drop_key_biases(model: Model) -> Model:
    """Drop key biases: they shift all scores of a query alike, which the softmax ignores.

    Coordinates that rotate with the position keep their biases.
    """
    computed: Computed = {}
    for name, space in model.spec.hidden.items():
        start = space.group.rotary if isinstance(space.group, RotaryPairs) else 0
        if space.translation != "drops" or start == space.group.size:
            continue
        for bias in _biases(model, name, Role.READS):
            if read_piece(bias, model.weights).any():
                computed[bias.piece.tensor] = partial(_zeroed, model.weights, bias, start)
    what = f"key biases of {len(computed)} layers set to zero where positions do not rotate them"
    return derived(model, computed, "keys", what)


def _biases(model: Model, space: str, role: Role) -> list[Occurrence]:
    return [
        occurrence
        for occurrence in model.spec.occurrences(space)
        if occurrence.role is role and len(model.spec.tensors[occurrence.piece.tensor]) == 1
    ]


def _bias_of(occurrence: Occurrence) -> str:
    return occurrence.piece.tensor.removesuffix("weight") + "bias"


def _zeroed(weights: Weights, bias: Occurrence, start: int) -> Tensor:
    tensor = weights[bias.piece.tensor].clone()
    view = bias.piece.view(tensor)
    view.narrow(bias.position, start, view.shape[bias.position] - start).zero_()
    return tensor


def _with_values(model: Model, target: str, space: str) -> Tensor:
    """The output bias `target` plus the output map applied to the value biases."""
    return model.weights[target] + passed_values(model.spec, target, space, model.weights)


def passing_values(spec: Spec) -> Iterator[tuple[str, str]]:
    """Each output bias that value biases pass into, and their space.

    Values that rotate with their position are not constant, and do not pass.
    """
    for name, space in spec.hidden.items():
        if space.translation == "passes" and not isinstance(space.group, RotaryPairs):
            readers = [one for one in spec.occurrences(name) if one.role is Role.READS]
            targets = dict.fromkeys(_bias_of(output) for output in readers)
            yield from ((target, name) for target in targets if target in spec.tensors)


def passed_values(
    spec: Spec, target: str, space: str, outputs: Weights, biases: Weights | None = None
) -> Tensor:
    """What the value biases of one model add to `target` through the output map of another."""
    biases = outputs if biases is None else biases
    result = torch.zeros_like(outputs[target])
    met = spec.occurrences(space)
    for output in met:  # one, unless visible coordinates sit beside the stream
        if output.role is not Role.READS or _bias_of(output) != target:
            continue
        spaces = [atom.space for atom in output.piece.atoms]
        letters = dict(zip(spaces, string.ascii_lowercase, strict=False))
        into = next(piece for piece in spec.pieces[target] if piece.atoms[0].space in letters)
        for bias in met:
            if bias.role is not Role.WRITES or len(spec.tensors[bias.piece.tensor]) != 1:
                continue
            axes = [_letters(piece, letters) for piece in (output.piece, bias.piece)]
            operands = read_piece(output, outputs), read_piece(bias, biases)
            equation = f"{','.join(axes)}->{letters[into.atoms[0].space]}"
            into.view(result).add_(torch.einsum(equation, *operands))
    return result


def _letters(piece: Piece, letters: dict[str, str]) -> str:
    return "".join(letters[atom.space] for atom in piece.atoms)
