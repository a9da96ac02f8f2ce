"""Frames: the coordinates in which a difference moves, and the way between two models' frames.

In a model's frame all gains on rotating streams are folded into the maps that read them, and
LayerNorm's means are removed. A difference of two models in one frame moves like a weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from symmerge.aligning.aligned import Aligned
from symmerge.errors import MismatchError, SymmergeWarning
from symmerge.models.alignment import Alignment, read_alignment
from symmerge.models.canonical.balancing import BALANCE
from symmerge.models.canonical.form import canonicalize
from symmerge.models.canonical.gains import fold
from symmerge.models.canonical.means import centre
from symmerge.models.canonical.ties import own_copies
from symmerge.models.circuits import circuit_of
from symmerge.models.model import Model
from symmerge.models.orbit import NEEDED
from symmerge.models.tables import check_same_table
from symmerge.symmetry.groups import Element, GeneralLinear, Group, RotaryPairs, ScaledPermutation
from symmerge.symmetry.spec import listing

INVERTIBLE = 1e-6  # of a change of basis times its inverse, from the identity


def framed(model: Model) -> Model:
    """The same function in the model's frame. Ties whose gain is folded are broken."""
    return centre(fold(model, constant=True))


def loosened(model: Model) -> Model:
    """The model as it is, with the ties broken that its frame does not have."""
    kept = framed(model).spec.ties
    aliases = [alias for alias in model.spec.ties if alias not in kept]
    return own_copies(model, aliases, "both uses move by themselves") if aliases else model


@final
@dataclass(frozen=True, repr=False)
class Passage:
    """The way from the frame of `base` to that of `other`.

    `alignment` brings `other` to `base`, both in the canonical form of these `steps`; `restrict`
    are the groups that it was restricted to.
    """

    base: Model
    other: Model
    alignment: Alignment
    steps: tuple[str, ...] = NEEDED
    restrict: Mapping[str, str] | None = None

    @staticmethod
    def of(alignment: Aligned) -> Passage:
        """The way back along an alignment of OTHER (its second model) to BASE (its first)."""
        (base, other), recipe = alignment.sources, alignment.recipe
        limits = recipe.restricted(base)
        return Passage(base, other, alignment.solution.alignment, recipe.steps, limits)

    @staticmethod
    def read(path: Any, base: Model, other: Model) -> Passage:
        """The way back along an alignment file that `symmerge align BASE OTHER` wrote."""
        header, _ = read_alignment(path)
        for role, model in (("source", other), ("reference", base)):
            _check_made_for(path, header, role, model)
        steps, limits = tuple(header.get("canonical", NEEDED)), header.get("restrict", {})
        prepared = canonicalize(other.restrict(**limits), steps)
        return Passage(base, other, Alignment.load(path, prepared.spec), steps, limits)

    def __repr__(self) -> str:
        return f"Passage({self.base.where} to {self.other.where}, {self.alignment!r})"

    def frame_of(self, model: Model) -> Model:
        """A model in its own frame, its groups restricted as the alignment's; kept in memory."""
        return framed(model.restrict(**(self.restrict or {}))).cached()

    @cached_property
    def start(self) -> Model:
        """BASE in its frame."""
        return self.frame_of(self.base)

    @cached_property
    def end(self) -> Model:
        """OTHER in its frame."""
        end = self.frame_of(self.other)
        check_same_table([self.start, end], "aligned")
        return end

    @cached_property
    def balances(self) -> tuple[Alignment, Alignment]:
        """From the frames of BASE and OTHER to balanced heads, where the alignment was found."""
        base, other = (
            balancing(model.restrict(**(self.restrict or {})), self.steps)
            for model in (self.base, self.other)
        )
        identity = Alignment.identity(self.start.spec)
        return tuple(  # type: ignore[return-value]
            replace(identity, elements={**identity.elements, **elements})
            for elements in (base, other)
        )

    @cached_property
    def there(self) -> Alignment:
        """From BASE's frame to OTHER's."""
        base, other = self.balances
        back = Alignment(self.start.spec, self.alignment.elements).inverse()
        return other.inverse().compose(back.compose(base))

    def along(self, alignment: Alignment) -> Passage:
        """Another way between the same models."""
        return replace(self, alignment=Alignment(self.alignment.spec, alignment.elements))


def _check_made_for(path: Any, header: Mapping[str, Any], role: str, model: Model) -> None:
    """Refuse an alignment of other models; files from elsewhere may not say of which they are."""
    digest = header.get(f"{role}_sha256")
    if digest and digest != model.digest():
        raise MismatchError(
            f"{path} was made for {header.get(role, 'another model')}, not for {model.where}:"
            f" give what symmerge align BASE OTHER wrote of these two"
        )


def balancing(model: Model, steps: tuple[str, ...]) -> dict[str, Element]:
    """The change of basis that the canonical step "balance" makes, by space."""
    if "balance" not in steps:
        return {}
    before = canonicalize(model, tuple(step for step in steps if step != "balance")).cached()
    elements: dict[str, Element] = {}
    short: list[str] = []
    for name, space in before.spec.hidden.items():
        if balance := BALANCE.get(type(space.group)):
            circuit = circuit_of(before, name)
            sides = circuit.x.double(), circuit.y.double()
            after = balance(space.group, *sides)
            element = _between(space.group, sides, after)
            if isinstance(space.group, GeneralLinear) and not _mutual(sides, after).all():
                short.append(name)
            still, batch = space.group.identity(before.spec.batch(name)), before.spec.batch(name)
            elements[name] = dict(still) | {
                part: value.reshape(*batch, *value.shape[1:]) for part, value in element.items()
            }
    if short:
        warnings.warn(
            f"{model.where}: heads of {listing(short)} are not of full rank, so the alignment says"
            " nothing about the rest of them: what changes there is carried as an approximation",
            SymmergeWarning,
            stacklevel=2,
        )
    return elements


Sides = tuple[Tensor, Tensor]


def _between(group: Group, before: Sides, after: Sides) -> dict[str, Tensor]:
    return BETWEEN[type(group)](group, before, after)


def _basis(group: Group, before: Sides, after: Sides) -> dict[str, Tensor]:
    return {"matrix": _invertible(before, after)}


def _invertible(before: Sides, after: Sides) -> Tensor:
    """g with after = (g x, g^-T y); the identity where a head is not of full rank."""
    g = after[0] @ torch.linalg.pinv(before[0])
    return torch.where(_mutual(before, after)[..., None, None], g, torch.eye(g.shape[-1]).to(g))


def _mutual(before: Sides, after: Sides) -> Tensor:
    """Of which heads the two sides change by inverse transposes: of those of full rank."""
    g, dual = (new @ torch.linalg.pinv(old) for old, new in zip(before, after, strict=True))
    error = (g @ dual.mT - torch.eye(g.shape[-1]).to(g)).abs()
    return error.flatten(-2).amax(-1) < INVERTIBLE if g.numel() else g.new_ones(g.shape[:-2]).bool()


def _scales(group: Group, before: Sides, after: Sides) -> dict[str, Tensor]:
    return {"scale": _ratio(before[0], after[0])}


def _ratio(before: Tensor, after: Tensor) -> Tensor:
    size = before.norm(dim=-1)
    return torch.where(size > 0, after.norm(dim=-1) / size.clamp_min(1e-300), 1.0)


def _pairs(group: Group, before: Sides, after: Sides) -> dict[str, Tensor]:
    assert isinstance(group, RotaryPairs)
    halves = [
        tuple(zip(*(group.split(side) for side in sides), strict=True)) for sides in (before, after)
    ]
    (first, second, rest), (new_first, new_second, new_rest) = halves
    old, new = (
        torch.cat([pair[0], other[0]], -1)
        for pair, other in ((first, second), (new_first, new_second))
    )
    size = _ratio(old, new)
    pair = torch.stack([size, torch.zeros_like(size)], -1)
    return {"pair": pair, "rest": _invertible(rest, new_rest)}  # type: ignore[arg-type]


BETWEEN: Mapping[type[Group], Callable[[Any, Sides, Sides], dict[str, Tensor]]] = {
    GeneralLinear: _basis,
    ScaledPermutation: _scales,
    RotaryPairs: _pairs,
}
