"""What flows through a model, as more tensors of its table: one column per token, for the input and output of its matrices.

A matrix's input lives in the space its reading axis meets, its output in the space it writes to. So the table's own axis says how these
coordinates move, and a solver that matches weights matches activations too, without knowing any architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symmerge.errors import MismatchError
from symmerge.symmetry.groups import Trivial
from symmerge.symmetry.notation import Atom, Product, Role, Sum, atoms, pieces, size
from symmerge.symmetry.spec import Space, Spec

SAMPLE = "sample"
DUAL = {Role.WRITES: Role.READS, Role.READS: Role.WRITES, Role.RIDES: Role.RIDES}
Score = Literal["correlation", "absolute", "cosine", "covariance", "product"]
"""How coordinates are compared: by correlation, its absolute value (which a permutation without signs does not explain: for comparison), cosine,
covariance, or plain products. For permutations the last is the distance as well: the lengths are the same in any order."""
CENTRED, SCALED = ("correlation", "absolute", "covariance"), ("correlation", "absolute", "cosine")
See = Callable[[str, Product, Tensor], None]
"""What to do with the coordinates of an axis, as they pass: (name, axis, values [..., coordinates])."""


@dataclass(frozen=True)
class Activations:
    """Coordinates of one model on some inputs: `values[name]` has one row per coordinate of `axes[name]`, one column for each of `counts[name]`
    samples. Values may be made only when they are asked for."""

    axes: Mapping[str, Product]
    values: Mapping[str, Float[Tensor, "coordinates samples"]]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class RecordedPair:
    """Both models' activations on the same inputs."""

    a: Activations
    b: Activations

    def activations(self, score: Score) -> tuple[Activations, Activations]:
        """As they are to be compared."""
        if score == "absolute":
            raise MismatchError(
                "absolute correlations need statistics, and own text is kept as samples: give data"
            )
        return _scored(self.a, score), _scored(self.b, score)


def mean_activations(found: Iterable[Activations]) -> Activations:
    """Of models on the same inputs; beside their sum one of them at a time is in memory."""
    count, total = 0, None
    for one in found:
        count += 1
        total = (
            one
            if total is None
            else replace(
                one, values={name: value + total.values[name] for name, value in one.values.items()}
            )
        )
    assert total is not None
    return (
        total
        if count == 1
        else replace(total, values={name: value / count for name, value in total.values.items()})
    )


def _scored(found: Activations, score: Score) -> Activations:
    values = dict(found.values)
    if score in CENTRED:
        values = {name: value - value.mean(1, keepdim=True) for name, value in values.items()}
    if score in SCALED:
        values = {
            name: value / value.norm(dim=1, keepdim=True).clamp_min(1e-30)
            for name, value in values.items()
        }
    return replace(found, values=values)


@dataclass(frozen=True)
class _Place:
    """Coordinates of a matrix's input or output that lie on one axis without sums; all of them if `index` is None."""

    name: str
    axis: Product
    index: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        return values if self.index is None else values[..., self.index.to(values.device)]


@contextmanager
def watch(spec: Spec, module: nn.Module, see: See) -> Iterator[None]:
    """While inside, show what passes the matrices of a module, each thing once.

    Preconditions: the module holds the weights of a model with this table.
    """
    known: dict[
        int, Tensor
    ] = {}  # inputs of this pass; held, so that no other tensor gets their number

    def show(
        inward: list[_Place],
        outward: list[_Place],
        owner: nn.Module,
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:
        new = id(inputs[0]) not in known  # queries, keys and values read the very same tensor
        known[id(inputs[0])] = inputs[0]
        for places, values in ((inward if new else [], inputs[0]), (outward, output)):
            for place in places:
                see(place.name, place.axis, place.of(values))

    hooks = [module.register_forward_pre_hook(lambda *_: known.clear())]
    hooks += [
        owner.register_forward_hook(partial(show, *places))
        for owner, *places in _watched(spec, module)
    ]
    try:
        yield
    finally:
        known.clear()
        for hook in hooks:
            hook.remove()


def _watched(spec: Spec, module: nn.Module) -> list[tuple[nn.Module, list[_Place], list[_Place]]]:
    """The matrices of a module, with what of their inputs and outputs is worth seeing."""
    found = []
    for name, owner in module.named_modules():
        axes = spec.tensors.get(f"{name}.weight", ())
        if _is_matrix(owner) and axes:
            reading, writing = axes[::-1] if isinstance(owner, nn.Linear) else axes
            found.append(
                (
                    owner,
                    _cut(spec, f"{name}.weight:in", _dual(reading)),
                    _cut(spec, f"{name}.weight:out", writing),
                )
            )
    # What another matrix reads is seen there, and whole: a block's own output is only a part of the stream.
    read = {
        space for _, inward, _ in found for place in inward for space in _spaces(spec, place.axis)
    }
    return [
        (owner, inward, [place for place in outward if not _spaces(spec, place.axis) <= read])
        for owner, inward, outward in found
    ]


def _cut(spec: Spec, name: str, axis: Product) -> list[_Place]:
    """An axis, cut where it is fused; without the parts that nothing moves."""
    cut = pieces(name, (axis,), spec.sizes)
    numbers = torch.arange(size(axis, spec.sizes))
    places = [
        _Place(f"{name}.{at}", Product(piece.atoms), piece.view(numbers).flatten())
        for at, piece in enumerate(cut)
    ]
    return [
        place
        for place in (places if len(cut) > 1 else [_Place(name, axis, None)])
        if _spaces(spec, place.axis)
    ]


def _spaces(spec: Spec, axis: Product) -> set[str]:
    return {atom.space for atom in atoms((axis,))} & spec.hidden.keys()


def _is_matrix(owner: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(owner, nn.Linear | Conv1D)


def _dual(axis: Product) -> Product:
    """The axis of the vectors that a reading axis meets."""
    return Product(
        tuple(
            Sum(tuple(_dual(term) for term in factor.terms))
            if isinstance(factor, Sum)
            else Atom(factor.space, DUAL[factor.role])
            for factor in axis.factors
        )
    )


@dataclass
class Recorder:
    """Keeps what passes one module: the same share of the same tokens for every model."""

    spec: Spec
    share: float = 1.0
    seed: int = 0
    axes: dict[str, Product] = field(default_factory=dict)
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def see(self, name: str, axis: Product, values: Tensor) -> None:
        flat = values.flatten(0, -2)
        picked = torch.randperm(len(flat), generator=torch.Generator().manual_seed(self.seed))[
            : max(1, round(self.share * len(flat)))
        ]
        self.axes[name] = axis
        self.parts.setdefault(name, []).append(flat[picked.to(flat.device)])

    def activations(self) -> Activations:
        """What was kept so far."""
        values = {name: torch.cat(parts).mT.contiguous() for name, parts in self.parts.items()}
        return Activations(
            self.axes, values, {name: value.shape[1] for name, value in values.items()}
        )


@contextmanager
def record_activations(
    spec: Spec, module: nn.Module, *, share: float = 1.0, seed: int = 0
) -> Iterator[Recorder]:
    """While inside, keep the coordinates of a share of the tokens that pass a module."""
    recorder = Recorder(spec, share, seed)
    with watch(spec, module, recorder.see):
        yield recorder


def extend_spec(spec: Spec, found: Activations) -> Spec:
    """The table with the activations as more tensors; samples are visible: nothing moves them."""
    spaces = {
        f"{SAMPLE}.{count}": Space(f"{SAMPLE}.{count}", Trivial(count))
        for count in found.counts.values()
    }
    tensors = {
        name: (axis, Product((Atom(f"{SAMPLE}.{found.counts[name]}", Role.WRITES),)))
        for name, axis in found.axes.items()
    }
    return replace(spec, spaces={**spec.spaces, **spaces}, tensors={**spec.tensors, **tensors})
