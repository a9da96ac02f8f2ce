"""What flows through a model, as more tensors of its table: one column per token, for the input and output of every matrix.

A matrix's input lives in the space its reading axis meets, its output in the space it writes to. So the table's own axis says how these
coordinates move, and a solver that matches weights matches activations too, without knowing any architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symmerge.groups import Trivial
from symmerge.notation import Atom, Product, Role, Sum, atoms
from symmerge.spec import Space, Spec

SAMPLE = "sample"
DUAL = {Role.WRITES: Role.READS, Role.READS: Role.WRITES, Role.RIDES: Role.RIDES}


@dataclass(frozen=True)
class Activations:
    """Coordinates of one model on some inputs: `values[name]` has one row per coordinate of `axes[name]`, one column per sample."""

    axes: Mapping[str, Product]
    values: Mapping[str, Float[Tensor, "coordinates samples"]]


@dataclass
class Recorder:
    """Collects what passes the matrices of one module: the same share of the same tokens for every model."""

    spec: Spec
    share: float
    seed: int
    axes: dict[str, Product] = field(default_factory=dict)
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    seen: dict[int, tuple[str, Tensor]] = field(default_factory=dict)

    def record(self, tensor: str, owner: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        axes = self.spec.tensors[tensor]
        reading, writing = (axes[1], axes[0]) if isinstance(owner, nn.Linear) else (axes[0], axes[1])
        # Queries, keys and values read the very same tensor: once is enough.
        if self.seen.setdefault(id(inputs[0]), (tensor, inputs[0]))[0] == tensor:
            self._keep(f"{tensor}:in", _dual(reading), inputs[0])
        if not _only(writing, self.spec.stream):  # a block's own output is only part of the stream, which its next reader sees whole
            self._keep(f"{tensor}:out", writing, output)

    def next_batch(self) -> None:
        self.seen.clear()

    def activations(self) -> Activations:
        """What was kept so far."""
        return Activations(self.axes, {name: torch.cat(parts).mT.contiguous() for name, parts in self.parts.items()})

    def _keep(self, name: str, axis: Product, values: Tensor) -> None:
        if not any(atom.space in self.spec.hidden for atom in atoms((axis,))):
            return
        flat = values.flatten(0, -2)
        picked = torch.randperm(len(flat), generator=torch.Generator().manual_seed(self.seed))[: max(1, round(self.share * len(flat)))]
        self.axes[name] = axis
        self.parts.setdefault(name, []).append(flat[picked.to(flat.device)])


@contextmanager
def recording(spec: Spec, module: nn.Module, *, share: float = 1.0, seed: int = 0) -> Iterator[Recorder]:
    """While inside, keep the coordinates of a share of the tokens that pass a module. Call `next_batch` after each pass.

    Preconditions: the module holds the weights of a model with this table.
    """
    recorder = Recorder(spec, share, seed)
    hooks = [
        owner.register_forward_hook(partial(recorder.record, f"{name}.weight"))
        for name, owner in module.named_modules()
        if _is_matrix(owner) and f"{name}.weight" in spec.tensors
    ]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def _is_matrix(owner: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(owner, nn.Linear | Conv1D)


def _dual(axis: Product) -> Product:
    """The axis of the vectors that a reading axis meets."""
    return Product(
        tuple(Sum(tuple(_dual(term) for term in factor.terms)) if isinstance(factor, Sum) else Atom(factor.space, DUAL[factor.role]) for factor in axis.factors)
    )


def _only(axis: Product, space: str) -> bool:
    return [atom.space for atom in atoms((axis,))] == [space]


def extended(spec: Spec, found: Activations) -> Spec:
    """The table with the activations as more tensors; samples are visible: nothing moves them."""
    samples = next(iter(found.values.values())).shape[1]
    spaces = {**spec.spaces, SAMPLE: Space(SAMPLE, Trivial(samples))}
    columns = Product((Atom(SAMPLE, Role.WRITES),))
    kept = {name: (axis, columns) for name, axis in found.axes.items() if found.values[name].shape[1] == samples}
    return replace(spec, spaces=spaces, tensors={**spec.tensors, **kept})
