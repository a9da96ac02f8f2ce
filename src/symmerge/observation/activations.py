"""Activations as extra tensors of a model's table: the inputs and outputs of its matrices.

The input of a matrix lives in the space its reading axis meets, its output in the space it writes
to. So the table's own axes say how these coordinates move, and a solver that matches weights
matches activations too, without knowing any architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symmerge.errors import MismatchError
from symmerge.symmetry.groups import Trivial
from symmerge.symmetry.notation import Atom, Product, Role, Sum, atoms, pieces, size
from symmerge.symmetry.spec import Space, Spec

Entry = TypeVar("Entry")
SAMPLE = "sample"
DUAL = {Role.WRITES: Role.READS, Role.READS: Role.WRITES, Role.RIDES: Role.RIDES}
Score = Literal["correlation", "absolute", "cosine", "covariance", "product"]
"""How coordinates are compared. `absolute` (absolute correlation) is for comparison only: no
permutation without signs explains it. For permutations `product` is equivalent to the distance:
norms do not depend on the order."""
CENTRED, SCALED = ("correlation", "absolute", "covariance"), ("correlation", "absolute", "cosine")
OnActivation = Callable[[str, Product, Tensor], None]
"""Called with (name, axis, values [..., coordinates]) for each activation."""


@dataclass(frozen=True)
class Activations:
    """Activations of one model: `values[name]` is [coordinates of `axes[name]`, `counts[name]`].

    Values may be computed only on access.
    """

    axes: Mapping[str, Product]
    values: Mapping[str, Float[Tensor, "coordinates samples"]]
    counts: Mapping[str, int]

    def without(self, names: Collection[str]) -> Activations:
        """The same without these activations."""

        def keep(entries: Mapping[str, Entry]) -> dict[str, Entry]:
            return {name: entry for name, entry in entries.items() if name not in names}

        return Activations(keep(self.axes), keep(self.values), keep(self.counts))


@runtime_checkable
class Observation(Protocol):
    """Activations of two models: recorded samples, or statistics of more than fits in memory."""

    @property
    def axes(self) -> Mapping[str, Product]:
        """The axis of every activation, in the order of the forward pass."""
        ...

    def activations(self, score: Score) -> tuple[Activations, Activations]:
        """Both models' activations, centred and scaled as the score requires."""
        ...

    def without(self, names: Collection[str]) -> Observation:
        """The same without these activations."""
        ...


@dataclass(frozen=True)
class RecordedPair:
    """Both models' activations, recorded on the same inputs."""

    a: Activations
    b: Activations

    @property
    def axes(self) -> Mapping[str, Product]:
        return self.a.axes

    def activations(self, score: Score) -> tuple[Activations, Activations]:
        if score == "absolute":
            raise MismatchError(
                "absolute correlations need statistics,"
                " and self-generated text is kept as samples: give data"
            )
        return _scored(self.a, score), _scored(self.b, score)

    def without(self, names: Collection[str]) -> RecordedPair:
        return RecordedPair(self.a.without(names), self.b.without(names))


def _scored(activations: Activations, score: Score) -> Activations:
    values = dict(activations.values)
    if score in CENTRED:
        values = {name: value - value.mean(1, keepdim=True) for name, value in values.items()}
    if score in SCALED:
        values = {
            name: value / value.norm(dim=1, keepdim=True).clamp_min(1e-30)
            for name, value in values.items()
        }
    return replace(activations, values=values)


def restrict_stream(
    observation: Observation, stream: str, which: Literal["all", "first", "last"]
) -> Observation:
    """Keep the stream only where it is first or last observed; keep everything else."""
    places = [
        name
        for name, axis in observation.axes.items()
        if [getattr(factor, "space", None) for factor in axis.factors] == [stream]
    ]
    return observation.without({"all": [], "first": places[1:], "last": places[:-1]}[which])


def mean_activations(models: Iterable[Activations]) -> Activations:
    """Mean over models on the same inputs; only the sum and one model are in memory at a time."""
    count, total = 0, None
    for one in models:
        count += 1
        total = one if total is None else _sum(one, total)
    assert total is not None
    if count == 1:
        return total
    return replace(total, values={name: value / count for name, value in total.values.items()})


def _sum(a: Activations, b: Activations) -> Activations:
    return replace(a, values={name: value + b.values[name] for name, value in a.values.items()})


@dataclass(frozen=True)
class _Place:
    """Coordinates of a matrix's input or output on one axis without sums; None means all."""

    name: str
    axis: Product
    index: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        return values if self.index is None else values[..., self.index.to(values.device)]


@dataclass(frozen=True)
class _Watched:
    """A matrix, and which parts of its inputs and outputs are reported."""

    module: nn.Module
    inputs: list[_Place]
    outputs: list[_Place]


@contextmanager
def watch(spec: Spec, module: nn.Module, callback: OnActivation) -> Iterator[None]:
    """Context in which every activation of a module is reported once per forward pass."""
    known: dict[int, Tensor] = {}  # inputs of this pass; held, so that their ids are not reused

    def show(
        watched: _Watched, owner: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        new = id(inputs[0]) not in known  # queries, keys and values read the very same tensor
        known[id(inputs[0])] = inputs[0]
        for places, values in (
            (watched.inputs if new else [], inputs[0]),
            (watched.outputs, output),
        ):
            for place in places:
                callback(place.name, place.axis, place.of(values))

    hooks = [module.register_forward_pre_hook(lambda *_: known.clear())]
    for watched in _watched(spec, module):
        hooks.append(watched.module.register_forward_hook(partial(show, watched)))
    try:
        yield
    finally:
        known.clear()
        for hook in hooks:
            hook.remove()


def _watched(spec: Spec, module: nn.Module) -> list[_Watched]:
    """The matrices of a module; outputs that another matrix reads are reported as its input."""
    matrices = []
    for name, owner in module.named_modules():
        axes = spec.tensors.get(f"{name}.weight", ())
        if _is_matrix(owner) and axes:
            reading, writing = axes[::-1] if isinstance(owner, nn.Linear) else axes
            inputs = _cut(spec, f"{name}.weight:in", _dual(reading))
            matrices.append(_Watched(owner, inputs, _cut(spec, f"{name}.weight:out", writing)))
    # A block's own output is only one summand of the stream; a reader sees the whole stream.
    read = {
        space
        for matrix in matrices
        for place in matrix.inputs
        for space in _hidden(spec, place.axis)
    }

    def unread(places: list[_Place]) -> list[_Place]:
        return [place for place in places if not _hidden(spec, place.axis) <= read]

    return [replace(matrix, outputs=unread(matrix.outputs)) for matrix in matrices]


def _cut(spec: Spec, name: str, axis: Product) -> list[_Place]:
    """Split an axis where it is fused, and leave out parts without symmetries."""
    cut = pieces(name, (axis,), spec.sizes)
    numbers = torch.arange(size(axis, spec.sizes))
    places = [_Place(name, axis, None)]
    if len(cut) > 1:
        places = [
            _Place(f"{name}.{at}", Product(piece.atoms), piece.view(numbers).flatten())
            for at, piece in enumerate(cut)
        ]
    return [place for place in places if _hidden(spec, place.axis)]


def _hidden(spec: Spec, axis: Product) -> set[str]:
    return {atom.space for atom in atoms((axis,))} & spec.hidden.keys()


def _is_matrix(owner: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(owner, nn.Linear | Conv1D)


def _dual(axis: Product) -> Product:
    """The axis of a matrix's input: the reading axis with its roles inverted."""
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
    """Records a share of the tokens that pass a module, the same tokens for every model."""

    spec: Spec
    share: float = 1.0
    seed: int = 0
    axes: dict[str, Product] = field(default_factory=dict)
    chunks: dict[str, list[Tensor]] = field(default_factory=dict)

    def record(self, name: str, axis: Product, values: Tensor) -> None:
        rows = values.flatten(0, -2)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))
        picked = order[: max(1, round(self.share * len(rows)))]
        self.axes[name] = axis
        self.chunks.setdefault(name, []).append(rows[picked.to(rows.device)])

    def activations(self) -> Activations:
        """Everything recorded so far."""
        values = {name: torch.cat(chunks).mT.contiguous() for name, chunks in self.chunks.items()}
        counts = {name: value.shape[1] for name, value in values.items()}
        return Activations(self.axes, values, counts)


@contextmanager
def record_activations(
    spec: Spec, module: nn.Module, *, share: float = 1.0, seed: int = 0
) -> Iterator[Recorder]:
    """Context that records the activations of a share of the tokens that pass a module."""
    recorder = Recorder(spec, share, seed)
    with watch(spec, module, recorder.record):
        yield recorder


def extend_spec(spec: Spec, activations: Activations) -> Spec:
    """The table extended by activations. No symmetry acts on their samples."""
    counts = activations.counts
    spaces = {
        f"{SAMPLE}.{count}": Space(f"{SAMPLE}.{count}", Trivial(count)) for count in counts.values()
    }
    tensors = {
        name: (axis, Product((Atom(f"{SAMPLE}.{counts[name]}", Role.WRITES),)))
        for name, axis in activations.axes.items()
    }
    return replace(spec, spaces={**spec.spaces, **spaces}, tensors={**spec.tensors, **tensors})
