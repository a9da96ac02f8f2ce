"""Carry directions: steering vectors, probes, dictionaries, cached keys and values, Adam's state.

A direction that is added to a space moves as what writes to it; one that is compared with it (a
probe, the encoder of a dictionary) as what reads from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from symmerge.aligning.aligned import Aligned
from symmerge.checkpoints.weights import working
from symmerge.errors import MismatchError
from symmerge.models.alignment import lay
from symmerge.models.tables import layer_count
from symmerge.symmetry.groups import Element, Group
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import listing
from symmerge.transporting.frames import Passage
from symmerge.transporting.streams import StreamMap, check_numbers

ROLES = {"added": Role.WRITES, "compared": Role.READS}
OPPOSITE = {Role.WRITES: Role.READS, Role.READS: Role.WRITES, Role.RIDES: Role.RIDES}
MONOMIAL = {"index", "sign", "scale"}  # parts of elements that mix no coordinates


def carry_direction(
    alignment: Aligned | Passage | StreamMap,
    vector: Tensor,
    *,
    space: str = "residual",
    layer: int | None = None,
    use: str = "added",
) -> Tensor:
    """A direction of BASE as one of OTHER, along an alignment of OTHER to BASE.

    `vector` is [..., coordinates], in a space inside heads [..., heads, coordinates]. The stream is
    that between layers (`hidden_states`), before any norm.

    | what | space | use |
    |---|---|---|
    | steering vector, decoder of a dictionary | residual | added |
    | linear probe, encoder of a dictionary | residual | compared |
    | hidden units | ff, with `layer` | added |
    | cached values | vo, with `layer` | added |
    | cached keys | qk, with `layer` | compared |

    The stream has the same coordinates after every layer; along a map of `fit_streams` it is that
    after its layer.
    """
    if use not in ROLES:
        raise MismatchError(f"use {use}: choose one of {', '.join(ROLES)}")
    check_numbers(vector, "a direction")
    if isinstance(alignment, StreamMap):
        _check_place(alignment, space, layer)
        return alignment.carry(vector, use)
    passage = alignment if isinstance(alignment, Passage) else Passage.of(alignment)
    spec = passage.end.spec
    name = _place(passage, space, layer)
    size, per = (*spec.batch(name), spec.sizes[name]), spec.spaces[name].per
    if tuple(vector.shape[-len(size) :]) != size:
        raise MismatchError(f"a direction in {name} ends in {list(size)}, not {list(vector.shape)}")
    if name not in spec.hidden:
        return vector.clone()
    if per is not None and per in spec.hidden:
        order = passage.there[per]["index"]
        vector = vector.index_select(-2, order.to(vector.device))
    exact = vector.to(working(vector.dtype))
    laid = exact.movedim(-1, 0) if per is None else exact.movedim((-2, -1), (0, 1))
    batch = laid.reshape(*([1] if per is None else [len(laid)]), size[-1], -1)
    acted = spec.spaces[name].group.act(passage.there[name], batch, ROLES[use])
    acted = acted.reshape(laid.shape).to(vector.dtype)
    return acted.movedim(0, -1) if per is None else acted.movedim((0, 1), (-2, -1))


def _place(passage: Passage, space: str, layer: int | None) -> str:
    """The name of a space; the stream is one for all layers."""
    spec, name = passage.end.spec, space if layer is None else f"{space}.{layer}"
    if space in spec.streams and layer is not None and 0 <= layer <= layer_count(passage.base):
        name = space
    if name not in spec.spaces:
        kinds = listing({re.sub(r"\.\d+$", "", each) for each in spec.hidden}, 12)
        raise MismatchError(
            f"no space called {name} in {spec.family}: there are {kinds}; those of a layer take"
            f" layer= from 0 to {layer_count(passage.base) - 1}"
        )
    return name


def _check_place(fitted: StreamMap, space: str, layer: int | None) -> None:
    if space != "residual" or layer not in (None, fitted.layer):
        raise MismatchError(
            f"the map is of the residual stream after layer {fitted.layer}, not of {space}"
            f"{'' if layer is None else f' {layer}'}: fit one there, or give an alignment"
        )


def carry_moments(
    passage: Passage, first: Mapping[str, Tensor], second: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The moments of Adam in BASE's frame as those of a model moved to OTHER's, by tensor.

    Gradients move by the inverse transpose. The second moment is known entry by entry only: it
    stays exact under permutations, signs and scales, and under rotations the result is the diagonal
    of what independent entries would have. So is the first moment of a gain that rotates.
    """
    for name, tensor in (*first.items(), *second.items()):
        _check_moment(passage, name, tensor)
    moved = {name: _gradient(passage, name, tensor) for name, tensor in first.items()}
    squares = {
        name: _gradient(passage, name, tensor, square=True) for name, tensor in second.items()
    }
    return moved, squares


def _check_moment(passage: Passage, name: str, tensor: Tensor) -> None:
    shapes = passage.end.spec.shapes
    if name not in shapes:
        raise MismatchError(
            f"no tensor called {name} in {passage.end.spec.architecture}: give moments by the names"
            " of the parameters"
        )
    check_numbers(tensor, f"the moment of {name}")
    if tuple(tensor.shape) != shapes[name]:
        raise MismatchError(
            f"the moment of {name} is {list(tensor.shape)}, and the tensor {list(shapes[name])}"
        )


def _gradient(passage: Passage, name: str, tensor: Tensor, *, square: bool = False) -> Tensor:
    exact = tensor.to(working(tensor.dtype))
    result = torch.empty_like(exact, memory_format=torch.contiguous_format)
    for piece in passage.end.spec.pieces[name]:
        dual = replace(
            piece,
            atoms=tuple(replace(atom, role=OPPOSITE[atom.role]) for atom in piece.atoms),
        )
        piece.view(result).copy_(_acted(passage, dual, piece.view(exact), square))
    return result.to(tensor.dtype)


def _acted(passage: Passage, piece: Piece, view: Tensor, square: bool) -> Tensor:
    """The piece moved, by the squares of the entries of every map if `square`.

    Of a gain only the diagonal is known, entry by entry: it moves by squares under rotations.
    """
    spec, there = passage.end.spec, passage.there
    order = sorted(
        range(len(piece.atoms)), key=lambda at: spec.spaces[piece.atoms[at].space].per is not None
    )
    for position in order:
        atom = piece.atoms[position]
        if atom.space in spec.hidden:
            space, element = spec.spaces[atom.space], there[atom.space]
            outer = None if space.per is None else next(piece.positions(space.per))
            laid, undo = lay(view, position, outer)
            squared = square or (atom.role is Role.RIDES and not element.keys() <= MONOMIAL)
            act = _squared if squared else _plain
            view = undo(act(space.group, element, atom.role, laid))
    return view


def _plain(group: Group, element: Element, role: Role, laid: Tensor) -> Tensor:
    return group.act(element, laid, role)


def _squared(group: Group, element: Element, role: Role, laid: Tensor) -> Tensor:
    parts = dict(element)
    if parts.keys() <= MONOMIAL:
        if "scale" in parts:
            parts["scale"] = parts["scale"].square()
        if "sign" in parts:
            parts["sign"] = torch.ones_like(parts["sign"])
        return group.act(parts, laid, role)
    one = torch.eye(group.size, dtype=laid.dtype).expand(len(laid), group.size, group.size)
    role = Role.WRITES if role is Role.RIDES else role
    return group.act(element, one, role).square() @ laid
