"""REPAIR after merging (Jordan et al. 2022): rescale outputs to the parents' variance.

Aligned coordinates agree only in part, so their mean varies less than either parent's. Each
coordinate is scaled and shifted so that its mean and standard deviation on some inputs are the
parents', interpolated. Both are folded into existing weights: the checkpoint stays stock. REPAIR
changes the merged function, so it is off by default and reported separately.

It helps after weight or activation matching. Learned matching has already optimised the midpoint
and does not need it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, Weights
from symmerge.errors import DataError, MismatchError
from symmerge.evaluation.tasks.base import Task, split
from symmerge.evaluation.tasks.preprocessing import check_same_tokenizers
from symmerge.merging.spreads import Spread, batches_for, measure_spreads, stages
from symmerge.models.model import (
    Model,
    device_of,
)
from symmerge.models.progress import Progress
from symmerge.symmetry.notation import atoms
from symmerge.symmetry.spec import Spec
from symmerge.verification.modules import full_module

Part = Literal["maps", "norms"]
"""What is repaired: outputs of linear maps (rows and biases) or of norms (gains and shifts)."""
HELD_OUT, MIN_SAMPLES = 0.25, 8  # share of samples for the losses; smallest number of samples
MIN_TOKENS = 32  # coordinates with fewer are left alone
MAX_SCALE = 100.0  # a coordinate that needs more has cancelled out: what remains is noise
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Repaired:
    """A repaired model, its metrics on held-out samples before and after, and what changed."""

    model: Model
    before: Metrics
    after: Metrics
    coordinates: int
    left_alone: int
    median_scale: float
    largest_scale: float

    def record(self) -> dict[str, object]:
        """Everything but the model, for result files."""
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
    """Repair a merge of models in one basin: `repair(average(a, b), [a, b], task)`.

    Module by module in the order of the forward pass, because outputs depend on the modules
    before: repairing all at once makes most merges worse. A quarter of the samples is held out
    for the losses.
    """
    _check_parents(merged, parents, shares)
    task.check_labels()
    if task.samples < MIN_SAMPLES:
        raise DataError(
            f"{task.samples} samples of {task.data} are too few for REPAIR:"
            f" give {MIN_SAMPLES} or more"
        )
    check_same_tokenizers(parents)
    fitted, held_out = split(task, HELD_OUT)
    where = device_of(device)
    module = full_module(merged, torch.float32).to(where)
    axes = map_axes(merged.spec, module) if part == "maps" else norm_axes(merged.spec, module)
    goals = [
        measure_spreads(full_module(parent, torch.float32).to(where), list(axes), fitted)
        for parent in parents
    ]
    before, changes = _metrics(module, held_out), {}
    offset = merged.spec.gain_offset if part == "norms" else 0.0
    steps = stages(module, list(axes), fitted)
    for number, names in enumerate(steps, 1):
        for name, spread in measure_spreads(module, names, fitted).items():
            targets = [goal[name] for goal in goals]
            changes[name] = replace(_change(axes[name], spread, targets, shares), offset=offset)
            changes[name].fold_into(module.get_submodule(name))
        if progress:
            progress(f"step {number} of {len(steps)}")
    samples = f"{part} by {fitted.samples} samples of {task.data}"
    what = f"{samples}; loss on {held_out.samples} held out"
    return _repaired(merged, changes, before, _metrics(module, held_out), what)


def _repaired(
    merged: Model, changes: Mapping[str, Change], before: Metrics, after: Metrics, what: str
) -> Repaired:
    """The result, with the changes in the model's weights and history."""
    scales = torch.cat([change.scale for change in changes.values()])
    left_alone = sum(change.left_alone for change in changes.values())
    median, largest = scales.median().item(), scales.max().item()
    count = len(scales) - left_alone
    result = Repaired(merged, before, after, count, left_alone, median, largest)
    done = (
        f"{count} coordinates brought to their parents' standard deviations and means"
        f" (scales: median {median:.3g}, largest {largest:.3g}), {len(changes)} {what}"
        f" {before['loss']:.4g} before, {after['loss']:.4g} after"
    )
    step = HistoryStep("repair", done, details=result.record())
    return replace(result, model=merged.derive(_weights(merged.weights, changes), step=step))


def _check_parents(merged: Model, parents: Sequence[Model], shares: Sequence[float]) -> None:
    """Refuse parents that the model cannot have been merged from."""
    if len(parents) != len(shares) or not parents:
        raise MismatchError(
            f"{len(parents)} parents but {len(shares)} shares:"
            " give one share per parent, those of the merge"
        )
    if abs(sum(shares) - 1) > 1e-6:
        raise MismatchError(
            f"the shares {', '.join(f'{share:g}' for share in shares)} sum to {sum(shares):g},"
            " not to 1: give those of the merge"
        )
    for parent in parents:
        merged.spec.check_same(
            parent.spec,
            f"the merge was not made from {parent.where} as it is here:"
            " give the models that were averaged",
        )


# Modules to repair: name -> output axis of the weight.


def map_axes(spec: Spec, module: nn.Module) -> dict[str, int]:
    """Linear maps inside the network, without heads (their outputs are tokens or classes)."""
    tables = [name for name, owner in module.named_modules() if isinstance(owner, nn.Embedding)]
    axes = {
        # transformers' Conv1D stores its weight transposed
        name: 0 if isinstance(owner, nn.Linear) else 1
        for name, owner in module.named_modules()
        if len(spec.tensors.get(f"{name}.weight", ())) == 2 and name not in tables
        if isinstance(owner, nn.Linear) or "nf" in vars(owner)  # a router has weights as well
    }
    met = Counter(
        atom.space
        for name in axes
        for atom in {*atoms(spec.tensors[f"{name}.weight"])}  # each role once
    )
    return {
        name: axis
        for name, axis in axes.items()
        if all(met[atom.space] > 1 for atom in atoms((spec.tensors[f"{name}.weight"][axis],)))
    }


def norm_axes(spec: Spec, module: nn.Module) -> dict[str, int]:
    """Norms: modules whose weight has one axis."""
    names = [name for name, _ in module.named_modules()]
    return {name: 0 for name in names if len(spec.tensors.get(f"{name}.weight", ())) == 1}


def _metrics(module: nn.Module, task: Task) -> dict[str, float]:
    return task.summary(task.losses(module, batch) for batch in batches_for(module, task))


@dataclass(frozen=True)
class Change:
    """A module's coordinates become `scale` times what they were, plus `shift`."""

    axis: int
    scale: Float[Tensor, " n"]
    shift: Float[Tensor, " n"]
    left_alone: int
    offset: float = 0.0  # what the module adds to its weight, as norms that multiply by 1 + w do

    def weight(self, old: Tensor) -> Tensor:
        shape = [-1 if dim == self.axis else 1 for dim in range(old.ndim)]
        return (old + self.offset) * self.scale.to(old).reshape(shape) - self.offset

    def bias(self, old: Tensor) -> Tensor:
        return old * self.scale.to(old) + self.shift.to(old)

    def fold_into(self, owner: nn.Module) -> None:
        for name, parameter in owner.named_parameters(recurse=False):
            setattr(owner, name, nn.Parameter(getattr(self, name)(parameter), requires_grad=False))


def _change(axis: int, spread: Spread, goals: Sequence[Spread], shares: Sequence[float]) -> Change:
    """The change from a module's output statistics to its parents', interpolated."""
    mean = sum(share * goal.mean for share, goal in zip(shares, goals, strict=True))
    deviation = sum(share * goal.deviation for share, goal in zip(shares, goals, strict=True))
    now = spread.deviation
    known = (now > 0) & (deviation > 0) & (deviation <= MAX_SCALE * now)
    known &= spread.rows >= MIN_TOKENS
    scale = torch.where(known, deviation / now, 1.0)
    shift = torch.where(known, mean - scale * spread.mean, 0.0)
    return Change(axis, scale, shift, int((~known).sum()))


def _weights(base: Weights, changes: Mapping[str, Change]) -> Weights:
    """The merge's weights with the changes applied, lazily."""
    tensors = {
        f"{name}.{kind}": partial(_changed, base, f"{name}.{kind}", getattr(change, kind))
        for name, change in changes.items()
        for kind in ("weight", "bias")
    }
    return DerivedWeights(base, {name: make for name, make in tensors.items() if name in base})


def _changed(base: Weights, name: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(base[name])
