"""Alternating sweeps over the stream, the heads (with the bases inside them) and the units.

Each step is the exact minimum over its spaces given the others, so the objective never increases.
Heads and units of all layers share no tensor: given the stream they are matched side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import NamedTuple, final

import torch
from torch import Tensor

from symmerge.matching.errors import CertainCrosses, MovedPieces, TensorError, measured
from symmerge.matching.evidence import Evidence
from symmerge.matching.heads import (
    AttentionSpaces,
    HeadOptions,
    Views,
    ViewsOf,
    attention_layers,
    match_heads,
)
from symmerge.models.alignment import Alignment, lay
from symmerge.symmetry.groups import (
    Element,
    GeneralLinear,
    Gram,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
)
from symmerge.symmetry.groups.indices import DENSE, Prices
from symmerge.symmetry.groups.invertible import determined
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Occurrence
from symmerge.symmetry.threads import side_by_side

GRAMS = 6  # per pair of units: three roles, their costs, the score, and one more for a moment
MEMORY = 6_000_000_000  # for Gram matrices of layers matched side by side

INDEXED = Permutation, SignedPermutation, ScaledPermutation  # solved by assignment

Block = AttentionSpaces | str
"""Spaces that are matched together: those of an attention layer, or one of units."""


class _Matched(NamedTuple):
    """The elements of a block, and what they leave in the tensors that nothing else changes."""

    elements: Mapping[str, Element]
    errors: tuple[TensorError, ...]


@final
class Sweeps:
    """One solve: its current elements, and the objective after each sweep.

    It can be stopped at any time and restored from its elements. With `subsample`, the first
    estimate of the stream uses a random half of the evidence, which gives a different start.
    """

    def __init__(
        self, evidence: Evidence, *, heads: HeadOptions, subsample: torch.Generator | None = None
    ) -> None:
        self.evidence, self.spec = evidence, evidence.spec
        chosen = evidence.weighting.all_layers
        self.all_layers = not evidence.determined if chosen is None else chosen
        self.elements: dict[str, Element] = {}
        self.objective: list[float] = []
        self.changes: list[int] = []
        self.distance = nan
        self._errors: dict[str, float] = {}
        self._heads, self._subsample = heads, subsample
        self._prices: dict[str, Prices] = {}
        self._crosses = CertainCrosses(evidence)
        attention = attention_layers(self.spec)
        known = {*self.spec.streams}.union(*(layer.spaces for layer in attention))
        units = [name for name in self.spec.hidden if name not in known]
        blocks: list[Block] = [*attention, *units]
        self._waves = self._independent(blocks)
        self._hubs = [name for name in units if self._meets_others(name, blocks)]
        widest = max((self.spec.sizes[name] for name in units), default=1)
        self._most = max(1, MEMORY // (GRAMS * evidence.dtype.itemsize * widest**2))
        if torch.device(evidence.device).type != "cpu":
            self._most = 1

    def restore(
        self, elements: Mapping[str, Element], objective: list[float], changes: list[int]
    ) -> None:
        """Continue from where an earlier solve was stopped."""
        self._set(elements)
        self.objective, self.changes = list(objective), list(changes)
        self._measure()  # the last sweep may have been the last of all

    def sweep(self) -> None:
        """Update every space once. If only certain tensors determine the stream, once is enough."""
        before, errors = dict(self.elements), list[TensorError]()
        self._match_stream()
        for wave in self._waves:
            # All before any is set: other threads still read the elements of this wave.
            for matched in list(side_by_side(self._match, wave, self._most)):
                self._set(matched.elements)
                errors += matched.errors
        self._measure(errors)
        self.objective.append(sum(self._errors.values()))
        self.changes.append(
            sum(_differs(before.get(name), element) for name, element in self.elements.items())
        )

    def settled(self, tolerance: float) -> bool:
        """Whether another sweep would gain little."""
        if not (self.all_layers or self._hubs):
            return bool(self.objective)
        if len(self.objective) < 2:
            return False
        before, after = self.objective[-2:]
        return before - after <= tolerance * abs(after)

    @property
    def alignment(self) -> Alignment:
        """The current elements; the identity for spaces without one."""
        table = self.evidence.table
        elements = {
            name: {part: value.cpu() for part, value in element.items()}
            for name, element in self.elements.items()
        }
        return Alignment(table, {**Alignment.identity(table).elements, **elements})

    def by_space(self) -> dict[str, float]:
        """The objective that remains in the tensors of each space after the last sweep."""
        return {
            space: sum(self._errors.get(tensor, 0.0) for tensor in sorted(self._tensors(space)))
            for space in self.spec.hidden
        }

    def _measure(self, known: Sequence[TensorError] = ()) -> None:
        """The error left in each tensor, and the distance between the models."""
        table, done = self.evidence.table.tensors, {error.name for error in known}
        names = [name for name in self.spec.tensors if self.evidence.scale(name) or name in table]
        rest = [name for name in names if name not in done]
        errors = [*known, *side_by_side(self._error, rest, self._most)]
        by_name = {error.name: error for error in errors}  # sums in one order, always
        self._errors = {name: by_name[name].weighted for name in names}
        apart, size_a, size_b = (
            sum(each) for each in zip(*(by_name[name].squares for name in names), strict=True)
        )
        self.distance = (apart / max((size_a * size_b) ** 0.5, 1e-30)) ** 0.5

    def _error(self, name: str) -> TensorError:
        known = self._crosses.error(name, self.elements)
        return known or measured(self.evidence, self.elements, name)

    def _set(self, elements: Mapping[str, Element]) -> None:
        self.elements |= {name: self._placed(element) for name, element in elements.items()}

    def _placed(self, element: Element) -> Element:
        return {part: value.to(self.evidence.device) for part, value in element.items()}

    # the steps

    def _match_stream(self) -> None:
        """A first estimate from the certain tensors; from all layers afterwards, if they count."""
        first = not self.objective
        if not (first or self.all_layers):
            return
        for stream in filter(self.spec.hidden.__contains__, self.spec.streams):
            if first:
                grams = self._grams(stream, self._only_streams(stream), self._subsample)
            else:
                grams = self._grams(stream)
            self._set({stream: self._nearest(stream, grams)})
        for hub in self._hubs if first else ():
            if grams := self._grams(hub, self._with_streams(hub)):
                self._set({hub: self._nearest(hub, grams)})

    def _meets_others(self, name: str, blocks: list[Block]) -> bool:
        """Whether a space shares a tensor with another block, so that both wait for each other."""
        return any(
            self._tensors(name) & set[str]().union(*map(self._tensors, _spaces_of(block)))
            for block in blocks
            if block != name
        )

    def _only_streams(self, stream: str) -> set[Piece]:
        """All of the tensors that are certain evidence for a stream."""
        certain = self.evidence.certain
        pieces = {met.piece for met in self.spec.occurrences(stream)}
        return {piece for piece in pieces if piece.tensor in certain}

    def _with_streams(self, hub: str) -> set[Piece]:
        """What meets a space and streams alone, which are matched before it."""
        hidden, known = self.spec.hidden.keys(), {hub, *self.spec.streams}
        pieces = {met.piece for met in self.spec.occurrences(hub)}
        return {piece for piece in pieces if {a.space for a in piece.atoms} & hidden <= known}

    def _independent(self, blocks: list[Block]) -> list[list[Block]]:
        """The blocks in order, cut where one shares a tensor with an earlier one."""
        waves: list[list[Block]] = []
        met: set[str] = set()
        for block in blocks:
            tensors = set[str]().union(*map(self._tensors, _spaces_of(block)))
            if not waves or tensors & met:
                waves.append([])
                met = set()
            waves[-1].append(block)
            met |= tensors
        return waves

    def _match(self, block: Block) -> _Matched:
        moved = MovedPieces()
        if isinstance(block, str):
            elements = {block: self._nearest(block, self._grams(block, moved=moved))}
        else:
            views = self._views(set(block.spaces), moved)
            elements = match_heads(self.spec, block, views, self._heads)
        placed = {name: self._placed(element) for name, element in elements.items()}
        return _Matched(elements, tuple(moved.errors(self.evidence, placed)))

    def _nearest(self, space: str, grams: Mapping[Role, Gram]) -> Element:
        """The exact minimum over one space."""
        group = self.spec.spaces[space].group
        if not grams:
            return group.identity()
        nothing = _zeros_like(next(iter(grams.values())))
        writes, reads = (grams.get(role) or nothing for role in (Role.WRITES, Role.READS))
        if isinstance(group, GeneralLinear):
            writes, reads = determined(writes, reads)
        evidence = writes, reads, grams.get(Role.RIDES)
        if isinstance(group, INDEXED):
            prices = self._prices.setdefault(space, Prices())
            element = group.nearest(*evidence, prices=prices)
        else:
            element = group.nearest(*evidence)
        if not isinstance(group, ScaledPermutation) or space not in self.elements:
            return element
        # This assignment relies on bounds, so the previous element may have been better.
        return min(self.elements[space], element, key=lambda one: group.cost(one, *evidence))

    # the evidence

    def _tensors(self, space: str) -> set[str]:
        return {occurrence.piece.tensor for occurrence in self.spec.occurrences(space)}

    def _views(self, moving: set[str], kept: MovedPieces | None = None) -> ViewsOf:
        """Both models' views of a piece, with B moved in every space but these.

        Those of tensors that meet nothing else but streams are `kept`, to be measured later.
        """
        still = {name: element for name, element in self.elements.items() if name not in moving}
        others, known = Alignment(self.spec, still), moving | {*self.spec.streams}

        def views(occurrence: Occurrence) -> Views:
            piece = occurrence.piece
            a, b = self.evidence.sides(piece.tensor)
            view, moved = piece.view(a), others.act_on(piece, piece.view(b))
            twice = False
            for position in piece.positions(next(iter(moving))) if len(moving) == 1 else ():
                if position != occurrence.position:  # a space twice in one tensor
                    moved, twice = self._act_at(occurrence, position, moved), True
            if kept is not None and not twice and self.evidence.hidden(piece.tensor) <= known:
                kept.pieces[piece] = view, moved
            return Views(view, moved, self.evidence.scale(piece.tensor))

        return views

    def _act_at(self, occurrence: Occurrence, position: int, view: Tensor) -> Tensor:
        """Move one more axis of a view, by its current element."""
        atom = occurrence.piece.atoms[position]
        if atom.space not in self.elements:
            return view
        laid, undo = lay(view, position, None)
        group = self.spec.spaces[atom.space].group
        return undo(group.act(self.elements[atom.space], laid, atom.role))

    def _grams(
        self,
        space: str,
        only: set[Piece] | None = None,
        subsample: torch.Generator | None = None,
        moved: MovedPieces | None = None,
    ) -> dict[Role, Gram]:
        """The evidence for a space, given the current elements of all others."""
        views, grams = self._views({space}, moved), {}
        # A permutation acts alike in every role: one sum instead of three.
        alike = isinstance(self.spec.spaces[space].group, Permutation)
        for occurrence in self.spec.occurrences(space):
            tensor = occurrence.piece.tensor
            left_out = only is not None and occurrence.piece not in only
            if left_out or not self.evidence.scale(tensor):
                continue
            gram = self._certain_gram(space, occurrence, views, subsample)
            role = Role.WRITES if alike else occurrence.role
            if role in grams:
                grams[role].add_(gram)
            else:
                grams[role] = gram
        return grams

    def _certain_gram(
        self, space: str, occurrence: Occurrence, views: ViewsOf, subsample: torch.Generator | None
    ) -> Gram:
        """That of an occurrence; where it never changes, computed once."""
        kept, name = self._crosses.crosses, occurrence.piece.tensor
        if subsample is not None or not self._crosses.holds(space, occurrence):
            return self._gram(space, occurrence, views(occurrence), subsample)
        if name not in kept:
            kept[name] = self._gram(space, occurrence, views(occurrence), None).cross
        return Gram(kept[name].clone())  # sums are made in place

    def _gram(
        self, space: str, occurrence: Occurrence, views: Views, subsample: torch.Generator | None
    ) -> Gram:
        a, b = (lay(view, occurrence.position, None)[0][0] for view in (views.a, views.b))
        if subsample is not None:
            a = a * (torch.rand(a.shape[-1], generator=subsample) < 0.5).to(a)
        group = self.spec.spaces[space].group
        scaled = isinstance(group, ScaledPermutation)
        squares = views.scale * b.square().sum(-1).double() if scaled else None
        right = None
        if isinstance(group, GeneralLinear | RotaryPairs):  # lengths change as well
            right = (b @ b.mT).double().mul_(views.scale)
        cross = a @ b.mT
        # A copy of thousands of units costs 0.5 GB per role; few are summed exactly.
        if not isinstance(group, INDEXED) or group.size <= DENSE:
            cross = cross.double()
        return Gram(cross.mul_(views.scale), right, squares)


def _spaces_of(block: Block) -> tuple[str, ...]:
    return (block,) if isinstance(block, str) else block.spaces


def _zeros_like(gram: Gram) -> Gram:
    squares, right = (
        None if one is None else torch.zeros_like(one) for one in (gram.squares, gram.right)
    )
    return Gram(torch.zeros_like(gram.cross), right, squares)


def _differs(before: Element | None, after: Element) -> bool:
    return before is None or any(
        not torch.allclose(before[part].double(), after[part].double(), atol=1e-6) for part in after
    )
