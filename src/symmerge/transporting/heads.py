"""A TUNED with more than its BASE: another head, more tokens. What BASE lacks is zero there.

So the change of a new row, or of a new head, is all of it, and moves like any other change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights, Weights, working
from symmerge.errors import MismatchError
from symmerge.models.alignment import Alignment
from symmerge.models.canonical.form import canonicalize
from symmerge.models.canonical.ties import own_copies
from symmerge.models.model import Model
from symmerge.symmetry.spec import Spec, listing
from symmerge.transporting.frames import Passage, framed

GROWING = ("vocabulary", "position", "type", "label")  # visible spaces that may differ in size
TIED = "tie_word_embeddings"


def has_more(base: Model, tuned: Model) -> bool:
    """Whether TUNED is of another class than BASE, or has rows or tensors that BASE has not."""
    return base.spec.architecture != tuned.spec.architecture or base.spec.shapes != (
        tuned.spec.shapes
    )


def tied_alike(base: Model, tuned: Model, other: Model) -> tuple[Model, Model, Model]:
    """The models with own copies of what another one does not tie; OTHER stays tied if it can."""
    base, tuned = _own(base, base.spec, tuned), _own(tuned, tuned.spec, base)
    frames = framed(base), framed(other)
    other = _own(other, frames[1].spec, frames[0])
    return *(_own(model, frames[0].spec, frames[1]) for model in (base, tuned)), other  # type: ignore[return-value]


def _own(model: Model, spec: Spec, without: Model) -> Model:
    """A model with own copies of what is tied in this table, and not in another model."""
    aliases = [alias for alias in model.spec.ties if alias in spec.ties]
    odd = [alias for alias in aliases if alias in without.spec.tensors]
    return own_copies(model, odd, f"{without.where} does not either") if odd else model


def as_tuned(model: Model, base: Model, tuned: Model) -> Model:
    """BASE, or OTHER, as a model of TUNED's class and size: zero where it has nothing. Lazy."""
    _check(base, tuned)
    model = _own(model, model.spec, tuned)
    tuned = _own(tuned, tuned.spec, model)
    # The config of the model itself, but for what TUNED changed in BASE's.
    changed = {key: to for key, to in tuned.config.items() if base.config.get(key) != to}
    if base.spec.architecture == tuned.spec.architecture:
        changed.pop(TIED, None)  # the model's own, which says whether it has a head of its own
    step = HistoryStep("extend", f"as {tuned.spec.architecture} of the size of {tuned.where}")
    return model.derive(
        _extended(model, tuned.spec),
        step=step,
        spec=tuned.spec,
        config={**model.config, **changed},
        files=tuned.files or model.files,
        stored_as={},
    )


def _extended(model: Model, spec: Spec) -> Weights:
    gains = {norm.gain for norm in spec.norms} | {scale.gain for scale in spec.scales}
    computed: dict[str, Callable[[], Tensor]] = {}
    about: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, shape in spec.shapes.items():
        there = name in model.weights
        about[name] = shape, model.weights.dtype(name) if there else model.dtype
        blank = 1.0 - spec.gain_offset if name in gains else 0.0
        computed[name] = partial(_grown, model if there else None, name, about[name], blank)
    return DerivedWeights(MemoryWeights({}), computed, added=about)


def _grown(
    model: Model | None, name: str, about: tuple[tuple[int, ...], torch.dtype], blank: float
) -> Tensor:
    shape, stored = about
    result = torch.full(shape, blank, dtype=working(stored))
    if model is not None:
        value = model.weights[name]
        result[tuple(slice(0, size) for size in value.shape)] = value
    return result


def _check(base: Model, tuned: Model) -> None:
    """Refuse a TUNED whose body is another one, or that lost rows."""
    before, after = base.spec, tuned.spec
    shared = before.shapes.keys() & after.shapes.keys()
    others = [name for name in after.sizes if name not in GROWING and name in before.sizes]
    odd = [name for name in others if before.sizes[name] != after.sizes[name]]
    kinds = {str(model.config.get("model_type")) for model in (base, tuned)}
    if before.family != after.family or len(kinds) > 1 or not shared or odd:
        what = f": they differ in {listing(odd)}" if odd else ""
        raise MismatchError(
            f"{tuned.where} is a {after.architecture} and {base.where} a {before.architecture},"
            f" not of one body{what}; give the base it was trained from"
        )
    for name in sorted(shared):
        if any(new < old for new, old in zip(after.shapes[name], before.shapes[name], strict=True)):
            raise MismatchError(
                f"{tuned.where}: {name} is {list(after.shapes[name])}, smaller than in"
                f" {base.where} ({list(before.shapes[name])}): rows that are gone cannot be carried"
            )


def headed(passage: Passage, tuned: Model) -> Passage:
    """The same way between models of TUNED's class and size; its own spaces stay as they are."""
    base, other = (as_tuned(one, passage.base, tuned) for one in (passage.base, passage.other))
    names = {name.partition(".")[0] for name in tuned.spec.spaces}
    limits = {key: to for key, to in (passage.restrict or {}).items() if key in names}
    spec = canonicalize(other.restrict(**limits), passage.steps).spec
    known: dict[str, Any] = {
        name: element for name, element in passage.alignment.elements.items() if name in spec.hidden
    }
    for name in known:
        if spec.spaces[name].group != passage.alignment.spec.spaces[name].group:
            raise MismatchError(
                f"{tuned.where}: its space {name} has another symmetry than that of"
                f" {passage.base.where}, so the bodies differ; give the base it was trained from"
            )
    elements = {**Alignment.identity(spec).elements, **known}
    alignment = Alignment(spec, elements)
    return replace(passage, base=base, other=other, alignment=alignment, restrict=limits)
