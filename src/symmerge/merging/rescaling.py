"""An optional last step after a merge: give every coordinate back the spread that averaging took from it.

Aligned coordinates agree only in part, so their mean varies less than either. As in REPAIR (Jordan et al. 2022), each coordinate of the merged model
is scaled and shifted until its standard deviation and mean on some inputs are its parents', interpolated. Both go into weights that are there
anyway: the checkpoint stays stock. It computes something else than the plain merge, so it is off by default and reported apart.

It helps where spread was lost: after matching by weights or activations. A learned alignment has seen its own middle and is best left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symmerge.checkpoints.weights import DerivedWeights, Weights
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks.base import Batch, Task, split
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.models.model import Model, Progress, device_of
from symmerge.symmetry.notation import atoms
from symmerge.symmetry.spec import Spec
from symmerge.verification.modules import full_module

Part = Literal["maps", "norms"]
"""What is repaired: what linear maps give, by their rows and biases, or what norms give, by their gains and shifts."""
HELD_OUT, FEWEST = (
    0.25,
    8,
)  # samples: the share that losses are taken on, and how many there must be
ROWS = 32  # tokens: a coordinate seen on fewer is left alone
MOST = (
    100.0  # a coordinate that would have to grow by more was wiped out: what is left of it is noise
)
Numbers = Mapping[str, float]  # metric -> value
See = Callable[[str, Tensor, Tensor], None]
"""What to do with what passes a module: (its name, its input, its output)."""


@dataclass(frozen=True)
class Repaired:
    """A repaired model; every metric on held-out samples before and after; how many coordinates were changed or left alone, and by how much."""

    model: Model
    before: Numbers
    after: Numbers
    coordinates: int
    left_alone: int
    median_scale: float
    largest_scale: float

    def record(self) -> dict[str, Any]:
        """For the results: everything but the model."""
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in vars(self).items()
            if name != "model"
        }


def repair(
    merged: Model,
    parents: Sequence[Model],
    task: Task,
    *,
    shares: Sequence[float] = (0.5, 0.5),
    part: Part = "maps",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Repaired:
    """Repair a merge of models that lie in one basin: `repair(merge(a, aligned), [a, aligned], task)`. A quarter of the samples only serves to measure.

    Module by module in the order of the forward pass, because what one gives depends on those before it; all at once makes most merges worse.
    """
    _belongs(merged, parents, shares)
    task.check_labels()
    if task.samples < FEWEST:
        raise DataError(
            f"{task.samples} samples of {task.data} are too few to repair by: give {FEWEST} or more"
        )
    check_same_tokenizers(parents)
    seen, held_out = split(task, HELD_OUT)
    where = device_of(device)
    module = full_module(merged, torch.float32).to(where)
    axes = _maps(merged.spec, module) if part == "maps" else _norms(merged.spec, module)
    goals = [
        _spreads(full_module(parent, torch.float32).to(where), list(axes), seen)
        for parent in parents
    ]
    before, changes = _metrics(module, held_out), {}
    stages = _stages(module, list(axes), seen)
    for number, stage in enumerate(stages, 1):
        for name, spread in _spreads(module, stage, seen).items():
            changes[name] = _change(axes[name], spread, [goal[name] for goal in goals], shares)
            changes[name].fold_into(module.get_submodule(name))
        if progress:
            progress(f"step {number} of {len(stages)}")
    after = _metrics(module, held_out)
    return _repaired(
        merged,
        changes,
        before,
        after,
        f"{part} by {seen.samples} samples of {task.data}; loss on {held_out.samples} held out",
    )


def _repaired(
    merged: Model, changes: Mapping[str, Change], before: Numbers, after: Numbers, what: str
) -> Repaired:
    """The model with the changes in its weights, and what was done in its record."""
    scales = torch.cat([change.scale for change in changes.values()])
    left_alone = sum(change.left_alone for change in changes.values())
    found = Repaired(
        merged,
        before,
        after,
        len(scales) - left_alone,
        left_alone,
        scales.median().item(),
        scales.max().item(),
    )
    done = f"{found.coordinates} coordinates brought to their parents' standard deviations and means (scales: median {found.median_scale:.3g}, largest"
    done += f" {found.largest_scale:.3g}), {len(changes)} {what} {before['loss']:.4g} before, {after['loss']:.4g} after"
    return replace(
        found,
        model=merged.derive(
            _weights(merged.weights, changes),
            step={"step": "repair", "what": done, **found.record()},
        ),
    )


def _belongs(merged: Model, parents: Sequence[Model], shares: Sequence[float]) -> None:
    """Refuse parents that a model cannot have been merged from."""
    if len(parents) != len(shares) or not parents:
        raise MismatchError(
            f"{len(parents)} parents but {len(shares)} shares: give one share per parent, those of the merge"
        )
    if abs(sum(shares) - 1) > 1e-6:
        raise MismatchError(
            f"the shares {', '.join(f'{share:g}' for share in shares)} sum to {sum(shares):g}, not to 1: give those of the merge"
        )
    for parent in parents:
        merged.spec.check_same(
            parent.spec,
            f"the merge was not made from {parent.where} as it is here: give the models that were averaged",
        )


# which modules: name -> the axis of its weight that has one index per coordinate it gives


def _maps(spec: Spec, module: nn.Module) -> dict[str, int]:
    """Linear maps inside the network. What a head gives (tokens, classes) no other map meets; heads are left alone."""
    tables = [name for name, owner in module.named_modules() if isinstance(owner, nn.Embedding)]
    found = {
        name: 0
        if isinstance(owner, nn.Linear)
        else 1  # transformers' other linear map is transposed
        for name, owner in module.named_modules()
        if len(spec.tensors.get(f"{name}.weight", ())) == 2 and name not in tables
    }
    met = Counter(
        atom.space
        for name in found
        for piece in spec.pieces[f"{name}.weight"]
        for atom in piece.atoms
    )
    return {
        name: axis
        for name, axis in found.items()
        if all(met[atom.space] > 1 for atom in atoms((spec.tensors[f"{name}.weight"][axis],)))
    }


def _norms(spec: Spec, module: nn.Module) -> dict[str, int]:
    return {
        name: 0
        for name, _ in module.named_modules()
        if len(spec.tensors.get(f"{name}.weight", ())) == 1
    }


# what they give


@dataclass
class Spread:
    """Sums over tokens of what a module gives, in float64."""

    rows: int = 0
    count: float | Tensor = 0.0
    total: float | Tensor = 0.0
    square: float | Tensor = 0.0

    def add(self, values: Float[Tensor, "*tokens n"], weights: Float[Tensor, "*tokens"]) -> None:
        wide, weights = values.double().flatten(0, -2), weights.flatten()
        self.rows += int((weights > 0).sum())
        self.count = self.count + weights.sum()
        self.total = self.total + weights @ wide
        self.square = self.square + weights @ wide.square()

    @property
    def mean(self) -> Float[Tensor, " n"]:
        return torch.as_tensor(self.total / self.count).cpu()

    @property
    def deviation(self) -> Float[Tensor, " n"]:
        """Zero for a coordinate that never changes: rounding leaves it a tiny variance of either sign."""
        square = torch.as_tensor(self.square / self.count).cpu()
        variance = square - self.mean.square()
        return torch.where(variance > 1e-10 * square, variance, 0.0).sqrt()


class _Enough(Exception):
    """All that was asked for has been seen: the rest of the pass is not needed."""


@torch.no_grad()
def _spreads(module: nn.Module, names: Sequence[str], task: Task) -> dict[str, Spread]:
    """What these modules give on all inputs of a task."""
    found = {name: Spread() for name in names}
    for batch in _batches(task, module):
        left = set(names)

        def see(
            name: str, _: Tensor, output: Tensor, batch: Batch = batch, left: set[str] = left
        ) -> None:
            found[name].add(output, _weights_of_tokens(output, batch))
            left.remove(name)
            if not left:
                raise _Enough

        with _watching(module, names, see):
            module(**{name: tensor for name, tensor in batch.items() if name != "labels"})
    return found


@torch.no_grad()
def _stages(module: nn.Module, names: Sequence[str], task: Task) -> list[list[str]]:
    """Names in the order of the forward pass, those that read the very same tensor together."""
    found: dict[int, list[str]] = {}
    held: list[Tensor] = []  # so that no other tensor gets the number of an earlier one

    def see(name: str, given: Tensor, _: Tensor) -> None:
        held.append(given)
        found.setdefault(id(given), []).append(name)

    with _watching(module, names, see):
        module(
            **{
                name: tensor
                for name, tensor in next(_batches(task, module)).items()
                if name != "labels"
            }
        )
    return list(found.values())


@contextmanager
def _watching(module: nn.Module, names: Sequence[str], see: See) -> Iterator[None]:
    """While inside, show what these modules take and give. (`activations.watch` shows the stream and what is matched, not what each map gives.)"""

    def show(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        see(name, inputs[0], output)

    hooks = [
        module.get_submodule(name).register_forward_hook(partial(show, name)) for name in names
    ]
    try:
        yield
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()


def _weights_of_tokens(values: Tensor, batch: Batch) -> Float[Tensor, "*tokens"]:
    """Pads are nobody's tokens. A model that gives one answer reads it off its first token: that counts as much as all others together."""
    weights = values.new_ones(values.shape[:-1], dtype=torch.float64)
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == weights.shape:
        weights = weights * mask
    if batch["labels"].ndim == 1 and weights.ndim == 2 and weights.shape[1] > 1:
        weights[:, 0] = weights[:, 1:].sum(1).clamp_min(1)
    return weights


def _batches(task: Task, module: nn.Module) -> Iterator[Batch]:
    device = next(module.parameters()).device
    return ({name: tensor.to(device) for name, tensor in batch.items()} for batch in task.batches)


def _metrics(module: nn.Module, task: Task) -> dict[str, float]:
    return task.summary(task.losses(module, batch) for batch in _batches(task, module))


# what is done to them


@dataclass(frozen=True)
class Change:
    """What becomes of a module's coordinates: `scale` times what they were, plus `shift`."""

    axis: int
    scale: Float[Tensor, " n"]
    shift: Float[Tensor, " n"]
    left_alone: int

    def weight(self, old: Tensor) -> Tensor:
        return old * self.scale.to(old).reshape(
            [-1 if dim == self.axis else 1 for dim in range(old.ndim)]
        )

    def bias(self, old: Tensor) -> Tensor:
        return old * self.scale.to(old) + self.shift.to(old)

    def fold_into(self, owner: nn.Module) -> None:
        for name, parameter in owner.named_parameters(recurse=False):
            setattr(owner, name, nn.Parameter(getattr(self, name)(parameter), requires_grad=False))


def _change(axis: int, found: Spread, goals: Sequence[Spread], shares: Sequence[float]) -> Change:
    """From what a module gives to what its parents give, interpolated."""
    mean = sum(share * goal.mean for share, goal in zip(shares, goals, strict=True))
    deviation = sum(share * goal.deviation for share, goal in zip(shares, goals, strict=True))
    now = found.deviation
    known = (now > 0) & (deviation > 0) & (deviation <= MOST * now) & (found.rows >= ROWS)
    scale = torch.where(known, deviation / now, 1.0)
    return Change(
        axis, scale, torch.where(known, mean - scale * found.mean, 0.0), int((~known).sum())
    )


def _weights(base: Weights, changes: Mapping[str, Change]) -> Weights:
    """The merge's weights with the changes in them; computed as they are read."""
    computed = {
        f"{name}.{kind}": partial(_changed, base, f"{name}.{kind}", getattr(change, kind))
        for name, change in changes.items()
        for kind in ("weight", "bias")
    }
    return DerivedWeights(
        base, {name: compute for name, compute in computed.items() if name in base}
    )


def _changed(base: Weights, name: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(base[name])
