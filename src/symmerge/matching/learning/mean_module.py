"""A stock module for means of models: parameters and gradients live in tensor blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from symmerge.checkpoints.weights import MemoryWeights
from symmerge.matching.learning.bundles import Layout, TensorBlock
from symmerge.matching.learning.distillation import DistillationBatch, distillation_loss
from symmerge.matching.optimization.buffers import copy_all
from symmerge.models.model import Model
from symmerge.verification.modules import full_module


@final
class MeanModule:
    """Write a mean to `mean`, then ask for its loss; `backward` leaves gradients in `gradient`."""

    def __init__(self, model: Model, layout: Layout, device: torch.device) -> None:
        table = layout.table
        self.mean, self.gradient = (TensorBlock(layout.stacks, device) for _ in range(2))
        moves = {met.piece.tensor for space in layout.spaces for met in table.occurrences(space)}
        weights = MemoryWeights(self.mean.tensors)
        self.module = full_module(replace(model, weights=weights), torch.float32)
        self.parameters: dict[str, list[nn.Parameter]] = {}  # of each tensor, wherever it is used
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            name = table.aliases.get(name, name)
            if name in self.mean.tensors:
                parameter.data = self.mean.tensors[name]
                parameter.requires_grad_(True)
                self.parameters.setdefault(name, []).append(parameter)
        self._moving = {name: uses for name, uses in self.parameters.items() if name in moves}
        self.module.to(device)

    def loss(self, batches: Sequence[DistillationBatch]) -> float:
        """The mean loss over these batches."""
        losses = (float(distillation_loss(self.module, batch)) for batch in batches)
        return sum(losses) / len(batches)

    def backward(self, batches: Sequence[DistillationBatch], scale: Tensor) -> Tensor:
        """The mean loss over these batches; its gradients, times `scale`, go to `gradient`."""
        with torch.enable_grad():
            loss = self._accumulate(batches, scale)
        self._gather()
        return loss

    def _accumulate(self, batches: Sequence[DistillationBatch], scale: Tensor) -> Tensor:
        share, losses = scale / len(batches), []
        for batch in batches:
            loss = distillation_loss(self.module, batch)
            loss.backward(share)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _gather(self) -> None:
        """Sum a tied tensor's gradients over its uses. Tensors without gradients stay zero."""
        targets, sources = [], []
        for name, uses in self._moving.items():
            gradients = [use.grad for use in uses if use.grad is not None]
            if gradients:
                targets.append(self.gradient.tensors[name])
                sources.append(sum(gradients[1:], gradients[0]))
        copy_all(targets, sources)
        for uses in self.parameters.values():
            for use in uses:
                use.grad = None
