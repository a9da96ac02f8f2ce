"""Bring B into the coordinates of A by the whole group, blind to what the test will look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from symmerge.lineage.shared import overlap
from symmerge.matching.device_tensors import to_solver
from symmerge.matching.evidence import Evidence, Weighting
from symmerge.matching.heads import HeadOptions
from symmerge.matching.sweeps import INDEXED, Sweeps
from symmerge.models.alignment import Alignment, apply
from symmerge.models.canonical.form import canonicalize
from symmerge.models.model import Model
from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Spec
from symmerge.symmetry.threads import same_bytes, side_by_side

UNITS = "ff."  # spaces of feed-forward units, one per layer
MAX_SWEEPS, TOLERANCE = 20, 1e-4


@dataclass(frozen=True)
class Undisguised:
    """A in canonical form, and B in its coordinates; both cut to what they share."""

    reference: Model
    aligned: Model

    @property
    def spec(self) -> Spec:
        """The table of both."""
        return self.reference.spec


def unit_spaces(spec: Spec) -> tuple[str, ...]:
    """The spaces of feed-forward units that can be permuted, by layer."""
    return tuple(
        name
        for name, space in spec.hidden.items()
        if name.startswith(UNITS) and isinstance(space.group, INDEXED)
    )


def outgoing(spec: Spec) -> dict[str, str]:
    """Unit space -> the tensor that reads it: what units write to the stream."""
    return {
        name: met.piece.tensor
        for name in unit_spaces(spec)
        for met in spec.occurrences(name)
        if met.role is Role.READS
    }


@torch.no_grad()
@same_bytes()
def undisguise(
    a: Model, b: Model, layers: Mapping[int, int], *, device: str = "cpu"
) -> Undisguised:
    """Align canonical `b` to `a` by everything but the outgoing weights of units.

    `layers` has a layer of A for each of B. Nothing is run: frequencies of tokens and
    self-generated text would look at all weights, and none may see what the test will look at.
    """
    first, second = (model.cached() for model in overlap(a, b, layers))
    alignment = solve(first, second, tuple(outgoing(first.spec).values()), device)
    return Undisguised(first, apply(alignment, second).cached())


@torch.no_grad()
@same_bytes()
def canonical(model: Model) -> Model:
    """The model in canonical form, in memory; large ones as far as there is room."""
    form = canonicalize(model).cached()
    # Workers share the decompositions of heads: half of what kinship takes at 124M parameters.
    for _ in side_by_side(form.weights.__getitem__, form.weights.names()):
        pass
    return form


def solve(a: Model, b: Model, held_out: tuple[str, ...] = (), device: str = "cpu") -> Alignment:
    """The symmetry that brings canonical `b` closest to `a`, from the tensors that remain."""
    tensors = {name: axes for name, axes in a.spec.tensors.items() if name not in held_out}
    evidence = Evidence(
        table=replace(a.spec, tensors=tensors),
        weights=to_solver((a.weights, b.weights), device, torch.float32),
        weighting=Weighting(),
        device=device,
    )
    sweeps = Sweeps(evidence, heads=HeadOptions())
    while len(sweeps.objective) < MAX_SWEEPS and not sweeps.settled(TOLERANCE):
        sweeps.sweep()
    return Alignment(a.spec, sweeps.alignment.elements)
