"""A model that moves along its symmetries, by gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn

from symmerge.checkpoints.weights import MemoryWeights, Weights
from symmerge.distributed import rank_and_world_size, sum_over_processes
from symmerge.matching.learning.bundles import Bundle, Layout, TensorBlock
from symmerge.matching.learning.gradients import bundled_gradients
from symmerge.matching.optimization.buffers import copy_all
from symmerge.matching.optimization.loop import CLIP_NORM
from symmerge.matching.resume import Elements
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model
from symmerge.symmetry.groups import Element
from symmerge.symmetry.notation import Role

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam


@final
class MovingModel:
    """A model's current elements, its weights moved by them, and the best elements so far.

    `base` is already applied to the weights; `elements` is what was learned since, by bundle.
    Continuous parts take Adam steps in the tangent space at the identity.
    """

    def __init__(
        self, model: Model, start: Alignment, layout: Layout, lr: float, device: torch.device
    ) -> None:
        self.original, self.layout, self.device = model, layout, device
        self.base = self.best = start
        self.projections = 0  # how many elements had drifted from their group
        self.tangents = {bundle: _zero_tangent(bundle, device) for bundle in layout.bundles}
        self.elements = {bundle: _identity(bundle, device) for bundle in layout.bundles}
        self.weights, self.moved = (TensorBlock(layout.stacks, device) for _ in range(2))
        self._sources = self._copy_to_device()
        self.parameters = [value for parts in self.tangents.values() for value in parts.values()]
        self.optimizer = self._optimizer(lr) if self.parameters else None
        self.fold(start)

    def _optimizer(self, lr: float) -> torch.optim.Adam:
        captured = self.device.type == "cuda"  # a captured graph needs the rate as a tensor
        rate = torch.tensor(lr, device=self.device) if captured else lr
        return torch.optim.Adam(
            self.parameters, lr=rate, betas=(0.9, 0.99), capturable=captured, fused=True
        )

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups if self.optimizer else ():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    @torch.no_grad()
    def fold(self, base: Alignment) -> None:
        """Restart from a base: apply it to the weights, and reset the elements to the identity."""
        self.base = base
        there = base.to(self.device)
        for name, tensor in self.weights.tensors.items():
            tensor.copy_(there.transport(name, self._sources[name]))
        self.moved.flat.copy_(self.weights.flat)
        for bundle, element in self.elements.items():
            for part, value in _identity(bundle, self.device).items():
                element[part].copy_(value)

    def _copy_to_device(self) -> Weights:
        """The original's weights where products are fast: it is moved again at every evaluation."""
        weights = self.original.weights
        if self.device.type == "cpu":
            return weights
        return MemoryWeights({name: weights[name].to(self.device) for name in weights})

    @torch.no_grad()
    def move(self) -> None:
        """Write the weights, moved by the current elements, to `moved`."""
        elements = {
            bundle: {part: value.float() for part, value in element.items()}
            for bundle, element in self.elements.items()
        }
        for stack, source in self.weights.stacks.items():
            stack.transport(elements, source, self.moved.stacks[stack])

    @torch.no_grad()
    def alignment(self) -> Alignment:
        """The current alignment in float64, projected to the groups: rounding accumulates."""
        table, identity = self.layout.table, Alignment.identity(self.layout.table)
        learned = dict(self._learned(identity))
        moved = Alignment(table, {**identity.elements, **learned}).compose(self.base)
        elements: dict[str, Element] = dict(moved.elements)
        for name in learned:
            elements[name], drifted = table.spaces[name].group.project(elements[name])
            self.projections += drifted
        return Alignment(table, elements)

    def _learned(self, identity: Alignment) -> Iterator[tuple[str, Element]]:
        """Elements learned since the base, by space; the identity where nothing is learned."""
        for bundle, element in self.elements.items():
            values = {part: value.cpu() for part, value in element.items()}
            for number, name in enumerate(bundle.names):
                yield (
                    name,
                    {
                        part: values[part][number] if part in values else value
                        for part, value in identity[name].items()
                    },
                )

    def keep_best(self) -> None:
        self.best = self.base

    def finite(self) -> bool:
        values = (value for element in self.elements.values() for value in element.values())
        return all(bool(value.isfinite().all()) for value in values)

    # one step

    @torch.no_grad()
    def follow(self, gradient: TensorBlock, share: Tensor | None = None) -> None:
        """One descent step: `gradient` is that by the moved weights, scaled by `share`."""
        if self.optimizer is None:
            return
        self._set_gradients(gradient)
        if share is not None:
            gradients = [value.grad for value in self.parameters]
            torch._foreach_mul_(gradients, share)  # type: ignore[reportPrivateImportUsage]
        self._average_over_processes()
        self._step(self.optimizer)

    def _set_gradients(self, gradient: TensorBlock) -> None:
        by_bundle = bundled_gradients(self.tangents, gradient, self.moved)
        for bundle, parts in self.tangents.items():
            roles = by_bundle[bundle]
            tangent = bundle.group.tangent_gradient(roles[Role.WRITES], roles[Role.READS])
            for part, value in parts.items():
                value.grad = tangent[part].contiguous()  # the fused step takes no other

    def _average_over_processes(self) -> None:
        """Average the gradients: processes see different inputs but must take the same step."""
        processes = rank_and_world_size()[1]
        if processes == 1:
            return
        gradients = {
            f"{number}": value.grad
            for number, value in enumerate(self.parameters)
            if value.grad is not None
        }
        for name, total in sum_over_processes(gradients).items():
            gradients[name].copy_(total / processes)

    def _step(self, optimizer: torch.optim.Adam) -> None:
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        optimizer.step()
        targets, sources = [], []
        for bundle, parts in self.tangents.items():
            tangent = {part: value.double() for part, value in parts.items()}
            element = bundle.group.retract(self.elements[bundle], tangent)
            targets += self.elements[bundle].values()
            sources += [element[part] for part in self.elements[bundle]]
        copy_all(targets, sources)
        torch._foreach_zero_(self.parameters)  # type: ignore[reportPrivateImportUsage]

    # resuming

    def state(self) -> dict[str, Elements]:
        """Current and best elements, and Adam's moments by space. Fold first, or steps are lost."""
        state: dict[str, Elements] = {"current": self.base.elements, "best": self.best.elements}
        if self.optimizer and self.optimizer.state:
            return state | {moment: self._moment(self.optimizer, moment) for moment in MOMENTS}
        return state

    def _moment(self, optimizer: torch.optim.Adam, moment: str) -> Elements:
        return {
            name: {
                part: optimizer.state[value][moment][number].cpu() for part, value in parts.items()
            }
            for bundle, parts in self.tangents.items()
            for number, name in enumerate(bundle.names)
        }

    def restore(self, state: Mapping[str, Elements], step: int) -> None:
        self.best = Alignment(self.layout.table, state["best"])
        self.fold(Alignment(self.layout.table, state["current"]))
        if self.optimizer is None or MOMENTS[0] not in state:
            return
        for bundle, parts in self.tangents.items():
            for part, value in parts.items():
                moments = {
                    moment: torch.stack([state[moment][name][part] for name in bundle.names])
                    for moment in MOMENTS
                }
                moments = {"step": torch.tensor(float(step)), **moments}
                self.optimizer.state[value] = {
                    name: moment.to(self.device) for name, moment in moments.items()
                }


def _zero_tangent(bundle: Bundle, device: torch.device) -> dict[str, nn.Parameter]:
    batch = (len(bundle.names), *bundle.batch)
    return {
        part: nn.Parameter(torch.zeros((*batch, *shape), device=device))
        for part, shape in bundle.group.tangent().items()
    }


def _identity(bundle: Bundle, device: torch.device) -> dict[str, Tensor]:
    element = bundle.group.start((len(bundle.names), *bundle.batch))
    return {part: value.to(device) for part, value in element.items()}
