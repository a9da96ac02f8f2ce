"""Which layer of one model each layer of another came from, where their depths differ."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.lineage.disguise import solve
from symmerge.lineage.shared import layers_of, overlap
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Spec, layer_of


@torch.no_grad()
def match_layers(a: Model, b: Model) -> dict[int, int]:
    """For each layer of canonical `b` a layer of canonical `a`: its own where depths agree.

    Elsewhere the one that reads the stream most alike. Outgoing weights are not looked at: they
    are held out for the test.
    """
    mine, theirs = layers_of(a.spec), layers_of(b.spec)
    if mine == theirs or not mine or not theirs:
        return {layer: layer for layer in theirs}
    first, second = overlap(_without_layers(a), _without_layers(b), {})
    rotation = solve(first, second)[b.spec.stream] if b.spec.stream in first.spec.hidden else None
    left = {layer: _reading(a, layer, None) for layer in mine}
    right = {
        layer: _reading(b, layer, Alignment(b.spec, {b.spec.stream: rotation} if rotation else {}))
        for layer in theirs
    }
    return {
        layer: max(mine, key=lambda other: _cosine(left[other], gram))
        for layer, gram in right.items()
    }


def _without_layers(model: Model) -> Model:
    tensors = {name: axes for name, axes in model.spec.tensors.items() if layer_of(name) is None}
    return replace(model, spec=replace(model.spec, tensors=tensors))


def _reading(
    model: Model, layer: int, alignment: Alignment | None
) -> Float[Tensor, "stream stream"]:
    """How a layer reads the stream: the same for every order of units and basis of heads."""
    spec, size = model.spec, model.spec.sizes[model.spec.stream]
    gram = torch.zeros(size, size)
    for name in _readers(spec, layer):
        tensor = model.weights[name]
        tensor = alignment.transport(name, tensor) if alignment else tensor
        for piece in spec.pieces[name]:
            view = piece.view(tensor)
            for at in piece.positions(spec.stream):
                rows = view.movedim(at, -1).reshape(-1, size).float()
                part = rows.mT @ rows
                gram += part / part.norm().clamp_min(1e-30)
    return gram - gram.diagonal().mean() * torch.eye(size)


def _readers(spec: Spec, layer: int) -> list[str]:
    return [
        name
        for name, pieces in spec.pieces.items()
        if layer_of(name) == layer
        and len(spec.shapes[name]) > 1
        and all(
            any(atom.space == spec.stream and atom.role is Role.READS for atom in piece.atoms)
            for piece in pieces
        )
    ]


def _cosine(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum() / (x.norm() * y.norm()).clamp_min(1e-30))
