"""Constants: a parameter in an input's place becomes part of the bias of the map that reads it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from symmerge.models.canonical.step import Computed, derived
from symmerge.models.model import Model
from symmerge.symmetry.notation import Atom, Piece, Role
from symmerge.symmetry.spec import Constant


def absorb_constants(model: Model) -> Model:
    """Move what maps make of constant inputs into their biases; input and map become zero.

    Averages of two biases are exact, and those of two factors are not.
    """
    computed: Computed = {}
    for constant in model.spec.constants:
        names = constant.parameter, *_map(model, constant)
        if any(_read(model, constant, name).any() for name in names[:2]):
            computed |= {name: partial(_absorbed, model, constant, name) for name in names}
    what = f"{len(computed) // 3} constant inputs moved into the biases of what reads them"
    return derived(model, computed, "constants", what)


def _map(model: Model, constant: Constant) -> tuple[str, str]:
    return model.spec.weight_of(constant.reader), model.spec.bias_of(constant.reader)


def _block(model: Model, constant: Constant, name: str) -> Piece:
    """The block of a tensor of the map that the constant goes through."""
    wanted = Atom(constant.space, Role.WRITES)
    return next(piece for piece in model.spec.pieces[name] if wanted in piece.atoms)


def _read(model: Model, constant: Constant, name: str) -> Tensor:
    tensor = model.weights[name]
    return tensor if name == constant.parameter else _block(model, constant, name).view(tensor)


def _absorbed(model: Model, constant: Constant, name: str) -> Tensor:
    """One of the three tensors afterwards."""
    weight, bias = _map(model, constant)
    if name == constant.parameter:
        return torch.zeros_like(model.weights[name])
    tensor = model.weights[name].clone()
    view = _block(model, constant, name).view(tensor)
    if name == bias:
        view += _read(model, constant, weight) @ model.weights[constant.parameter].flatten()
    else:
        view.zero_()
    return tensor
