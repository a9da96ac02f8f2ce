"""Bundles of spaces, stacks of tensors: one product for all layers instead of one per layer."""

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

ALIGNED = 64  # numbers: where a stack begins in a block of memory, so that the fastest products can read it


# all layers at once


@final
@dataclass(frozen=True, eq=False)
class Bundle:
    """Spaces with the same group and the same number of elements. Their elements are one element of the group, with one more batch dimension in front."""

    group: Group
    batch: Shape
    names: tuple[str, ...]

    @property
    def alone(self) -> bool:
        return len(self.names) == 1


def bundles(spec: Spec, spaces: Iterable[str]) -> tuple[Bundle, ...]:
    """The spaces that can move continuously, bundled; those of one name lie side by side, layer after layer."""
    found: dict[tuple[Group, Shape], list[str]] = {}
    for name in sorted(spaces, key=lambda name: name.partition(".")[0]):
        group = spec.spaces[name].group
        if any(map(prod, group.tangent().values())):
            found.setdefault((group, spec.batch(name)), []).append(name)
    return tuple(Bundle(group, batch, tuple(names)) for (group, batch), names in found.items())


@final
@dataclass(frozen=True, eq=False)
class Meeting:
    """A dimension of a piece that a bundle moves; `first` is the element that moves the first tensor of the stack, the others have the ones that follow."""

    bundle: Bundle
    first: int
    position: int
    outer: int | None
    role: Role

    def lay(self, view: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """A piece, the layers in its last dimension, as [layers, *batch, n, rest], and the way back."""
        layers = view.ndim - 1
        batch = [] if self.outer is None else [self.outer]
        rest = [dim for dim in range(layers) if dim not in (*batch, self.position)]
        # Where coordinates of the stream lie side by side in memory, the layers are more of the rest: one large product, and nothing is copied.
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
        """Those that move the tensors of the stack; what is alone moves them all."""
        return {
            part: value[self.first : self.first + (1 if self.bundle.alone else layers)]
            for part, value in bundle.items()
        }


@final
@dataclass(frozen=True, eq=False)
class Stack:
    """Tensors of one shape, cut into the same pieces, each of which meets the next element of the same bundles."""

    names: tuple[str, ...]
    shape: Shape
    pieces: tuple[tuple[Piece, tuple[Meeting, ...]], ...]

    @property
    def moves(self) -> bool:
        return any(meetings for _, meetings in self.pieces)

    def views(self, *sides: Tensor) -> list[tuple[tuple[Meeting, ...], list[Tensor]]]:
        """Every piece that moves, layers last: a piece counts its own dimensions from the first."""
        return [
            (meetings, [piece.view(side.movedim(0, -1)) for side in sides])
            for piece, meetings in self.pieces
            if meetings
        ]

    def transport(self, elements: Mapping[Bundle, Element], source: Tensor, target: Tensor) -> None:
        """Put the tensors in their new coordinates into `target`, which has them in the old ones where nothing moves."""
        for meetings, (view, into) in self.views(source, target):
            for met in meetings:
                laid, back = met.lay(view)
                view = back(
                    met.bundle.group.act(
                        met.elements(elements[met.bundle], len(self.names)), laid, met.role
                    )
                )
            into.copy_(view)


def stacks(spec: Spec, bundled: Sequence[Bundle]) -> tuple[Stack, ...]:
    """Every tensor of the table, in stacks that are as high as can be."""
    numbers = {
        name: (bundle, number) for bundle in bundled for number, name in enumerate(bundle.names)
    }
    runs: dict[object, list[list[str]]] = {}
    meetings = {
        name: tuple(_meetings(spec, piece, numbers) for piece in spec.pieces[name])
        for name in spec.tensors
    }
    for name, cut in spec.pieces.items():
        alike = spec.shapes[name], tuple(piece.steps for piece in cut), _next(meetings[name], None)
        mine = runs.setdefault(alike, [])
        if mine and _next(meetings[mine[-1][-1]], 1) == _next(meetings[name], 0):
            mine[-1].append(name)
        else:
            mine.append([name])
    found = (run for alike in runs.values() for run in alike)
    return tuple(
        Stack(
            tuple(run),
            spec.shapes[run[0]],
            tuple(zip(spec.pieces[run[0]], meetings[run[0]], strict=True)),
        )
        for run in found
    )


def _meetings(
    spec: Spec, piece: Piece, numbers: Mapping[str, tuple[Bundle, int]]
) -> tuple[Meeting, ...]:
    """What only rides along is not moved: gains follow permutations alone."""
    found = []
    for position, atom in enumerate(piece.atoms):
        if atom.space in numbers and atom.role is not Role.RIDES:
            per = spec.spaces[atom.space].per
            found.append(
                Meeting(
                    *numbers[atom.space],
                    position,
                    None if per is None else next(piece.positions(per)),
                    atom.role,
                )
            )
    return tuple(found)


def _next(meetings: tuple[tuple[Meeting, ...], ...], step: int | None) -> object:
    """The meetings of the tensor `step` layers on; of any of them, if none is said."""
    return tuple(
        (
            met.bundle,
            met.position,
            met.outer,
            met.role,
            None if step is None else met.first + (0 if met.bundle.alone else step),
        )
        for cut in meetings
        for met in cut
    )


@final
class Block:
    """All tensors of a model in one piece of memory: as a whole, by stack, and by name."""

    def __init__(self, stacked: Sequence[Stack], device: torch.device) -> None:
        lengths = [len(stack.names) * prod(stack.shape) for stack in stacked]
        room = [-(-length // ALIGNED) * ALIGNED for length in lengths]
        self.whole = torch.zeros(sum(room), device=device)
        parts = zip(stacked, lengths, self.whole.split(room), strict=True)
        self.stacks = {
            stack: part[:length].view(len(stack.names), *stack.shape)
            for stack, length, part in parts
        }
        self.tensors = {
            name: tensor
            for stack, value in self.stacks.items()
            for name, tensor in zip(stack.names, value, strict=True)
        }
