"""Prove a table: random elements of every space change nothing, those of larger groups do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from symmerge.derivation.running import EXACT, Runner, difference, parameters_of
from symmerge.errors import SymmergeError, SymmetryError
from symmerge.models.alignment import Alignment
from symmerge.models.canonical.form import canonicalize
from symmerge.models.model import Model
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    RotaryPairs,
    ScaledPermutation,
    SignedPermutation,
    Signs,
    Trivial,
)
from symmerge.symmetry.spec import Space, Spec

FORBIDDEN = 1e-2  # the least that an element of a larger group changes the outputs by
TRIES = 3
SMALL_GROUP = 8  # coordinates
FEW = 256  # coordinates that an element of a wide larger group moves
State = Literal["refused", "unsure"]


@dataclass(frozen=True)
class Larger:
    """What a larger group does to the outputs."""

    symmetry: Group
    change: float
    state: State

    @property
    def group(self) -> str:
        """Its name."""
        return self.symmetry.name


@dataclass(frozen=True)
class SpaceProof:
    """The evidence for one space."""

    space: str
    group: str
    size: int
    per: str | None
    change: float
    larger: tuple[Larger, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether random elements change nothing but rounding."""
        return self.change <= EXACT

    @property
    def unsure(self) -> tuple[Larger, ...]:
        """Larger groups of which nothing is known."""
        return tuple(one for one in self.larger if one.state == "unsure")


def larger_groups(group: Group, *, holds: bool = False) -> list[Group]:
    """The next larger groups of our list.

    A space that `holds` others (heads) gets all signs and scales from the bases inside.
    """
    n = group.size
    if holds:
        return [Orthogonal(n)] if n > 1 else []
    by_name: dict[str, Callable[[], list[Group]]] = {
        "Trivial": lambda: [Signs(n), Permutation(n)],
        "Signs": lambda: [SignedPermutation(n), ScaledPermutation(n, positive=False)],
        "Permutation": lambda: [
            SignedPermutation(n),
            ScaledPermutation(n, positive=True),
            OrthogonalFixingOnes(n),
        ],
        "SignedPermutation": lambda: [ScaledPermutation(n, positive=False), Orthogonal(n)],
        "ScaledPermutation": lambda: [
            *(
                [ScaledPermutation(n, positive=False)]
                if isinstance(group, ScaledPermutation) and group.positive
                else []
            ),
            GeneralLinear(n),
        ],
        "OrthogonalFixingOnes": lambda: [Orthogonal(n)],
        "Orthogonal": lambda: [GeneralLinear(n)],
        "RotaryPairs": lambda: [Orthogonal(n), GeneralLinear(n)],
    }
    groups = by_name.get(group.name, list)()
    return [one for one in groups if n > 2 or not isinstance(one, OrthogonalFixingOnes)]


def _element_of_larger(
    group: Group, generator: torch.Generator, batch: tuple[int, ...]
) -> Mapping[str, Tensor]:
    """A random element, of wide matrix groups one that moves few coordinates: seconds less each."""
    if (
        not isinstance(group, GeneralLinear | Orthogonal | OrthogonalFixingOnes)
        or group.size <= FEW
    ):
        return group.random(generator, batch)
    few = replace(group, size=FEW).random(generator, batch)["matrix"]
    dual = torch.linalg.inv(few).mT if isinstance(group, GeneralLinear) else few
    return {"matrix": _padded(few, group.size), "dual": _padded(dual, group.size)}


def _padded(matrix: Tensor, size: int) -> Tensor:
    whole = torch.eye(size, dtype=matrix.dtype).repeat(*matrix.shape[:-2], 1, 1)
    whole[..., : matrix.shape[-1], : matrix.shape[-1]] = matrix
    return whole


class Prover:
    """Applies elements of one space at a time to a model, and runs its module."""

    def __init__(self, model: Model, runner: Runner) -> None:
        self.runner = runner
        self.source, self.stored = runner.outputs_of_model(model), model
        self.model = canonicalize(model, ("fold",)).cached()
        self.tensors = parameters_of(runner.module, self.model)

    @cached_property
    def folding(self) -> float:
        """How much folding the gains changes the outputs."""
        return difference(self.runner.outputs(self.tensors), self.source)

    def read_means(self) -> tuple[str, ...]:
        """Streams whose mean something else than a norm reads: the canonical form leaves it in."""
        spec = self.model.spec
        streams = [
            one.name for one in spec.hidden.values() if isinstance(one.group, OrthogonalFixingOnes)
        ]
        return tuple(one for one in streams if self._centring(set(streams) - {one}) > EXACT)

    def _centring(self, kept: Collection[str]) -> float:
        spec = replace(self.model.spec, read_means=tuple(kept))
        centred = canonicalize(replace(self.model, spec=spec), ("centre",))
        return difference(self.runner.outputs_of_model(centred), self.source)

    def change(self, space: Space, seed: int) -> float:
        """How much a random element of a space changes the outputs."""
        spec = replace(self.model.spec, spaces={**self.model.spec.spaces, space.name: space})
        generator = torch.Generator().manual_seed(seed)
        own = space.group == self.model.spec.spaces[space.name].group
        random = space.group.random if own else partial(_element_of_larger, space.group)
        return self.moved(spec, {space.name: random(generator, spec.batch(space.name))})

    def while_tied(self, seed: int) -> dict[str, float]:
        """The changes by the table before tied tensors get their own copies.

        There a stream that rotates later can at least permute, its gains with it.
        """
        if self.model.spec is self.stored.spec or not self.stored.spec.ties:
            return {}
        before = Prover.__new__(Prover)
        before.runner, before.source, before.model = self.runner, self.source, self.stored
        before.tensors = parameters_of(self.runner.module, self.stored)
        spec = self.stored.spec
        return {
            name: before.exact(
                replace(space, group=Permutation(space.group.size))
                if spec.rotates(name)
                else space,
                seed,
            )
            for name, space in spec.hidden.items()
            if name not in spec.joined
        }

    def moved(self, spec: Spec, elements: Mapping[str, Mapping[str, Tensor]]) -> float:
        """How much an alignment changes the outputs."""
        alignment = Alignment(spec, elements)
        changed = {piece.piece.tensor for space in elements for piece in spec.occurrences(space)}
        moved = {
            name: alignment.transport(name, self.model.weights[name]).double() for name in changed
        }
        moved |= {alias: moved[target] for alias, target in spec.ties.items() if target in moved}
        return difference(self.runner.outputs({**self.tensors, **moved}), self.source)

    def all_at_once(self, seed: int) -> float:
        """How much a random element of the whole group changes the outputs."""
        spec = self.model.spec
        alignment = Alignment.random(spec, torch.Generator().manual_seed(seed))
        return self.moved(spec, alignment.elements)

    def exact(self, space: Space, seed: int) -> float:
        """The change by an element of the space's own group; infinite if none can be applied."""
        tries = 2 if space.group.size >= SMALL_GROUP else 6  # few signs may all be plus
        try:
            return max(self.change(space, seed + at) for at in range(tries))
        except SymmergeError:
            return float("inf")

    def larger(self, space: Space, seed: int) -> Iterator[Larger]:
        """What the next larger groups do."""
        spaces = self.model.spec.hidden.values()
        holds = any(one.per == space.name for one in spaces)
        for group in larger_groups(space.group, holds=holds):
            try:
                yield self._larger(replace(space, group=group), seed)
            except SymmetryError:  # a gain that is not constant: it would have to change
                yield Larger(group, float("inf"), "refused")

    def _larger(self, space: Space, seed: int) -> Larger:
        change = 0.0
        for at in range(TRIES):
            change = max(change, self.change(space, seed + at))
            if change >= FORBIDDEN:
                return Larger(space.group, change, "refused")
        # no change at all proves nothing either: no number may have left the linear part of a ReLU6
        return Larger(space.group, change, "unsure")

    def observed(self, space: Space, seed: int) -> bool:
        """Whether the outputs for the example inputs depend on the tensors of a space at all.

        Those of an expert that no input chose, or of the scores of one token, do not.
        """
        try:
            names = {one.piece.tensor for one in self.model.spec.occurrences(space.name)}
        except SymmergeError:  # for the proof to say
            return True
        return any(self._with_noise(name, seed) > EXACT for name in sorted(names))

    def _with_noise(self, name: str, seed: int) -> float:
        tensor, generator = self.tensors[name], torch.Generator().manual_seed(seed)
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        tensors = {**self.tensors, name: tensor + noise * tensor.std(correction=0).clamp_min(0.1)}
        ties = self.model.spec.ties
        tensors |= {alias: tensors[name] for alias, target in ties.items() if target == name}
        return difference(self.runner.outputs(tensors), self.source)

    def prove(self, space: Space, seed: int) -> SpaceProof:
        """The evidence for a space."""
        change = self.exact(space, seed)
        larger = tuple(self.larger(space, seed)) if change <= EXACT else ()
        return SpaceProof(space.name, space.group.name, space.group.size, space.per, change, larger)


__all__ = ["Larger", "Prover", "RotaryPairs", "SpaceProof", "Trivial"]
