"""Bundles of spaces and stacks of tensors: one matrix product for all layers.

On a GPU, small products cost as much as launching them. So spaces with the same group (the bases
of all heads of all layers) share one tensor, a bundle. Tensors that meet them in the same way (the
queries of all layers) share another, a stack. A step takes one product per stack, not per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor

from symmerge.symmetry.groups import Element, Group
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Shape, Spec

ALIGNMENT = 64  # elements: stacks start at multiples of it, where the fastest kernels can read them


@final
@dataclass(frozen=True, eq=False)
class Bundle:
    """Spaces with the same group and batch shape; their elements are stacked along a new axis."""

    group: Group
    batch: Shape
    names: tuple[str, ...]

    @property
    def alone(self) -> bool:
        return len(self.names) == 1


def bundle_spaces(spec: Spec, spaces: Iterable[str]) -> tuple[Bundle, ...]:
    """The spaces that can move continuously, in bundles; ordered by kind, then by layer."""
    names_by_kind: dict[tuple[Group, Shape], list[str]] = {}
    for name in sorted(spaces, key=lambda name: name.partition(".")[0]):
        group = spec.spaces[name].group
        if any(map(prod, group.tangent().values())):
            names_by_kind.setdefault((group, spec.batch(name)), []).append(name)
    return tuple(Bundle(*kind, tuple(names)) for kind, names in names_by_kind.items())


@final
@dataclass(frozen=True, eq=False)
class Meeting:
    """A dimension of a piece that a bundle moves.

    Element `first` moves the first tensor of the stack, the next element the next tensor.
    """

    bundle: Bundle
    first: int
    position: int
    outer: int | None
    role: Role

    def lay(self, view: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Reshape a piece (layers last) to [layers, *batch, n, rest]; also the inverse."""
        layers = view.ndim - 1
        batch = [] if self.outer is None else [self.outer]
        rest = [dim for dim in range(layers) if dim not in (*batch, self.position)]
        # Where the stream is the last dimension, merge layers into the rest: one product, no copy.
        joined = self.bundle.alone and self.position == layers - 1
        order = (
            [*batch, self.position, layers, *rest]
            if joined
            else [layers, *batch, self.position, *rest]
        )
        permuted = view.permute(order)
        laid = permuted.reshape(
            1 if joined else view.shape[-1], *self.bundle.batch, view.shape[self.position], -1
        )
        back = sorted(range(len(order)), key=order.__getitem__)
        return laid, lambda moved: moved.reshape(permuted.shape).permute(back)

    def elements(self, bundle: Element, layers: int) -> Element:
        """The elements that move the stack's tensors; a bundle of one space moves them all."""
        return {
            part: value[self.first : self.first + (1 if self.bundle.alone else layers)]
            for part, value in bundle.items()
        }


@final
@dataclass(frozen=True, eq=False)
class Stack:
    """Tensors of one shape and the same pieces, each moved by the next element of its bundles."""

    names: tuple[str, ...]
    shape: Shape
    pieces: tuple[tuple[Piece, tuple[Meeting, ...]], ...]

    @property
    def moves(self) -> bool:
        return any(meetings for _, meetings in self.pieces)

    def views(self, *sides: Tensor) -> list[tuple[tuple[Meeting, ...], list[Tensor]]]:
        """Every piece that moves, layers last, so that a piece's dimensions keep their numbers."""
        return [
            (meetings, [piece.view(side.movedim(0, -1)) for side in sides])
            for piece, meetings in self.pieces
            if meetings
        ]

    def transport(self, elements: Mapping[Bundle, Element], source: Tensor, target: Tensor) -> None:
        """Write what moves into `target`, in new coordinates; leave the rest of it untouched."""
        for meetings, (view, into) in self.views(source, target):
            for met in meetings:
                laid, back = met.lay(view)
                view = back(
                    met.bundle.group.act(
                        met.elements(elements[met.bundle], len(self.names)), laid, met.role
                    )
                )
            into.copy_(view)


def stack_tensors(spec: Spec, bundles: Sequence[Bundle]) -> tuple[Stack, ...]:
    """Every tensor of the table, in as few stacks as possible."""
    places = {name: (bundle, at) for bundle in bundles for at, name in enumerate(bundle.names)}
    meetings = {
        name: tuple(_meetings(spec, piece, places) for piece in pieces)
        for name, pieces in spec.pieces.items()
    }
    runs: dict[object, list[list[str]]] = {}
    for name, pieces in spec.pieces.items():
        steps = tuple(piece.steps for piece in pieces)
        kind = spec.shapes[name], steps, _in_layer(meetings[name], None)
        alike = runs.setdefault(kind, [])
        follows = alike and _in_layer(meetings[alike[-1][-1]], 1) == _in_layer(meetings[name], 0)
        if follows:
            alike[-1].append(name)
        else:
            alike.append([name])

    def stack(names: list[str]) -> Stack:
        pieces = tuple(zip(spec.pieces[names[0]], meetings[names[0]], strict=True))
        return Stack(tuple(names), spec.shapes[names[0]], pieces)

    return tuple(stack(names) for alike in runs.values() for names in alike)


def _meetings(
    spec: Spec, piece: Piece, places: Mapping[str, tuple[Bundle, int]]
) -> tuple[Meeting, ...]:
    """Where bundles move a piece. Riding axes are left out: gains follow permutations only."""

    def meeting(position: int, space: str, role: Role) -> Meeting:
        per = spec.spaces[space].per
        outer = None if per is None else next(piece.positions(per))
        return Meeting(*places[space], position, outer, role)

    return tuple(
        meeting(position, atom.space, atom.role)
        for position, atom in enumerate(piece.atoms)
        if atom.space in places and atom.role is not Role.RIDES
    )


def _in_layer(meetings: tuple[tuple[Meeting, ...], ...], step: int | None) -> object:
    """Key of a tensor's meetings, `step` layers further on; without the layer if None."""

    def element(met: Meeting) -> int | None:
        return None if step is None else met.first + (0 if met.bundle.alone else step)

    return tuple(
        (met.bundle, met.position, met.outer, met.role, element(met))
        for piece in meetings
        for met in piece
    )


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """What moves in a table, and how its tensors are laid out in memory."""

    table: Spec
    spaces: tuple[str, ...]
    bundles: tuple[Bundle, ...]
    stacks: tuple[Stack, ...]

    @staticmethod
    def of(table: Spec, spaces: Sequence[str]) -> Layout:
        bundles = bundle_spaces(table, spaces)
        return Layout(table, tuple(spaces), bundles, stack_tensors(table, bundles))


@final
class TensorBlock:
    """All tensors of a model in one contiguous buffer: flat, by stack, and by name."""

    def __init__(self, stacked: Sequence[Stack], device: torch.device) -> None:
        lengths = [len(stack.names) * prod(stack.shape) for stack in stacked]
        room = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
        self.flat = torch.zeros(sum(room), device=device)
        parts = zip(stacked, lengths, self.flat.split(room), strict=True)
        self.stacks = {
            stack: part[:length].view(len(stack.names), *stack.shape)
            for stack, length, part in parts
        }
        self.tensors = {
            name: tensor
            for stack, value in self.stacks.items()
            for name, tensor in zip(stack.names, value, strict=True)
        }
