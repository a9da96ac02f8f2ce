"""Alternating sweeps over the stream, the heads (with the bases inside them) and the units.

Each step is the exact minimum over its spaces given the others, so the objective never increases from sweep to sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import nan
from typing import final

import torch
from torch import Tensor

from symmerge.matching.evidence import Evidence
from symmerge.matching.heads import HeadOptions, Sides, layers, match_heads
from symmerge.models.alignment import Alignment, lay
from symmerge.symmetry.groups import Element, Gram, Permutation, ScaledPermutation
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Occurrence


@final
class Sweeps:
    """One solve: the elements so far, and how the objective went. May be stopped at any time and continued from its elements.

    Where every layer speaks for the stream, it does so after a first estimate from the certain tensors. `thin` gives another start: the first
    estimate sees a random half of the evidence.
    """

    def __init__(
        self, evidence: Evidence, *, heads: HeadOptions, thin: torch.Generator | None = None
    ) -> None:
        self.evidence, self.spec = evidence, evidence.spec
        chosen = evidence.weighting.all_layers
        self.all_layers = not evidence.determined if chosen is None else chosen
        self.elements: dict[str, Element] = {}
        self.objective: list[float] = []
        self.changes: list[int] = []
        self.distance = nan
        self._errors: dict[str, float] = {}
        self._heads, self._thin = heads, thin
        self._attention = layers(self.spec)
        inside = {name for heads in self._attention for name in heads.spaces}
        self._units = [
            name for name in self.spec.hidden if name != self.spec.stream and name not in inside
        ]

    def restore(
        self, elements: Mapping[str, Element], objective: list[float], changes: list[int]
    ) -> None:
        """Take up where an earlier solve was."""
        self._keep(elements)
        self.objective, self.changes = list(objective), list(changes)

    def sweep(self) -> None:
        """Every space once. Where only certain tensors speak for the stream, one sweep is all there is."""
        before = dict(self.elements)
        first = not self.objective
        if first or self.all_layers:
            self._step(
                self.spec.stream,
                self.evidence.certain if first else None,
                thin=self._thin if first else None,
            )
        for heads in self._attention:
            self._keep(match_heads(self.spec, heads, self._sides(set(heads.spaces)), self._heads))
        self._all_units()
        self._errors = self._measure()
        self.objective.append(sum(self._errors.values()))
        self.changes.append(
            sum(_differs(before.get(name), element) for name, element in self.elements.items())
        )

    def settled(self, tolerance: float) -> bool:
        """Whether another sweep would change anything worth the while."""
        if not self.all_layers:
            return bool(self.objective)
        return len(self.objective) > 1 and self.objective[-2] - self.objective[
            -1
        ] <= tolerance * abs(self.objective[-1])

    @property
    def alignment(self) -> Alignment:
        """What was found, and the identity where nothing was yet."""
        table = self.evidence.table
        found = {
            name: {part: value.cpu() for part, value in element.items()}
            for name, element in self.elements.items()
        }
        return Alignment(table, {**Alignment.identity(table).elements, **found})

    def _measure(self) -> dict[str, float]:
        """What is left of the objective in each tensor; and how far the models are apart."""
        moved, found, plain = (
            Alignment(self.spec, self.elements),
            {},
            torch.zeros(3, dtype=torch.float64),
        )
        for name in self.spec.tensors:
            scale, is_weight = self.evidence.scale(name), name in self.evidence.table.tensors
            if not (scale or is_weight):
                continue
            a, b = self.evidence.plain(name)
            there = moved.transport(name, b)
            left = (
                there - a
            ).square_()  # not in place: what nothing moves is still the model's own
            if is_weight:
                plain += torch.tensor(
                    [float(side.sum()) for side in (left, a.square(), there.square())]
                )
            rows = self.evidence.rows(name)
            found[name] = (
                scale
                * (left.sum() if rows is None else left.sum(1) @ rows.to(left).square()).item()
            )
        self.distance = (plain[0] / (plain[1] * plain[2]).sqrt().clamp_min(1e-30)).sqrt().item()
        return found

    def by_space(self) -> dict[str, float]:
        """What the last sweep left of the objective in the tensors that meet each space."""
        return {
            name: sum(
                self._errors.get(tensor, 0.0)
                for tensor in {met.piece.tensor for met in self.spec.occurrences(name)}
            )
            for name in self.spec.hidden
        }

    def _keep(self, found: Mapping[str, Element]) -> None:
        for name, element in found.items():
            self.elements[name] = {
                part: value.to(self.evidence.device) for part, value in element.items()
            }

    def _sides(self, moving: set[str]) -> Sides:
        """Both models' views of a piece, B moved in every other space; and how much the piece counts."""
        others = Alignment(
            self.spec,
            {name: element for name, element in self.elements.items() if name not in moving},
        )

        def sides(met: Occurrence) -> tuple[Tensor, Tensor, float]:
            a, b = self.evidence.sides(met.piece.tensor)
            view = others.act_on(met.piece, met.piece.view(b))
            for position in met.piece.positions(next(iter(moving))) if len(moving) == 1 else ():
                if (
                    position != met.position
                ):  # a space met twice in one tensor: the other place stays as it is now
                    view = self._act_at(met, position, view)
            return met.piece.view(a), view, self.evidence.scale(met.piece.tensor)

        return sides

    def _act_at(self, met: Occurrence, position: int, view: Tensor) -> Tensor:
        atom = met.piece.atoms[position]
        if atom.space not in self.elements:
            return view
        laid, undo = lay(view, position, None)
        return undo(
            self.spec.spaces[atom.space].group.act(self.elements[atom.space], laid, atom.role)
        )

    def _all_units(self) -> None:
        """Every other space. Assignments run beside the products of the next layer, as long as the two share no tensor."""
        with ThreadPoolExecutor(1) as pool:
            pending: tuple[str, Future[Element]] | None = None
            for name in self._units:
                if pending and self._tensors(pending[0]) & self._tensors(name):
                    self._keep({pending[0]: pending[1].result()})
                    pending = None
                grams = self._grams(name, None)
                if pending:
                    self._keep({pending[0]: pending[1].result()})
                pending = name, pool.submit(self._nearest, name, grams)
            if pending:
                self._keep({pending[0]: pending[1].result()})

    def _tensors(self, space: str) -> set[str]:
        return {met.piece.tensor for met in self.spec.occurrences(space)}

    def _step(self, space: str, only: set[str] | None, thin: torch.Generator | None = None) -> None:
        """The exact minimum over one space."""
        if space in self.spec.hidden:
            self._keep({space: self._nearest(space, self._grams(space, only, thin))})

    def _nearest(self, space: str, grams: Mapping[Role, Gram]) -> Element:
        group = self.spec.spaces[space].group
        if not grams:
            return group.identity()
        some = next(iter(grams.values()))
        nothing = Gram(
            torch.zeros_like(some.cross),
            None if some.right is None else torch.zeros_like(some.cross),
        )
        evidence = grams.get(Role.WRITES, nothing), grams.get(Role.READS), grams.get(Role.RIDES)
        found = group.nearest(*evidence)
        if (
            isinstance(group, ScaledPermutation) and space in self.elements
        ):  # the assignment goes by bounds: keep what was better
            return min(
                self.elements[space], found, key=lambda element: group.cost(element, *evidence)
            )
        return found

    def _grams(
        self, space: str, only: set[str] | None, thin: torch.Generator | None = None
    ) -> dict[Role, Gram]:
        """The evidence for a space, given all others as they are now."""
        sides, grams = self._sides({space}), {}
        same = isinstance(
            self.spec.spaces[space].group, Permutation
        )  # acts alike in every role: one sum instead of three
        for met in self.spec.occurrences(space):
            if (only is None or met.piece.tensor in only) and self.evidence.scale(met.piece.tensor):
                gram = self._gram(space, met, sides, thin)
                role = Role.WRITES if same else met.role
                if role in grams:
                    grams[role].add_(gram)
                else:
                    grams[role] = gram
        return grams

    def _gram(
        self, space: str, met: Occurrence, sides: Sides, thin: torch.Generator | None
    ) -> Gram:
        *views, scale = sides(met)
        a, b = (lay(view, met.position, None)[0][0] for view in views)
        if thin is not None:
            a = a * (torch.rand(a.shape[-1], generator=thin) < 0.5).to(a)
        scaled = isinstance(self.spec.spaces[space].group, ScaledPermutation)
        right = torch.diag_embed(scale * b.square().sum(-1).double()) if scaled else None
        return Gram((a @ b.mT).double().mul_(scale), right)


def _differs(before: Element | None, after: Element) -> bool:
    return before is None or any(
        not torch.allclose(before[part].double(), after[part].double(), atol=1e-6) for part in after
    )
