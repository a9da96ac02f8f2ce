"""Tensors where a solver computes: on a GPU they are copied there once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights, Weights, fitting
from symmerge.models.model import Model
from symmerge.symmetry.threads import side_by_side

SHARE = 0.3  # of the free memory of a GPU, for each of two models: Gram matrices need the rest


@runtime_checkable
class Tensors(Protocol):
    """Tensors by name."""

    def __getitem__(self, name: str, /) -> Tensor: ...


@final
class DeviceTensors(Mapping[str, Tensor]):
    """A model's tensors on a device, in a solver's precision, as many as fit into `room` bytes.

    Workers read them side by side, because canonical forms cost a decomposition per head. What
    does not fit is read anew each time.
    """

    def __init__(self, weights: Weights, device: str, dtype: torch.dtype, room: int) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype
        names = list(fitting(weights, room, dtype))
        self._there = dict(zip(names, side_by_side(self._read, names), strict=True))

    def _read(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def __getitem__(self, name: str) -> Tensor:
        there = self._there.get(name)
        return self._read(name) if there is None else there

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.names())

    def __len__(self) -> int:
        return len(self._weights.names())


def placed(model: Model, tensors: Tensors) -> Model:
    """The model, with its tensors read from where a solver has them."""
    read = {name: partial(tensors.__getitem__, name) for name in model.weights}
    return replace(model, weights=DerivedWeights(model.weights, read))


def to_solver(
    models: tuple[Weights, Weights], device: str, dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    """The tensors of both models for a solver; a processor reads them where they are."""
    where = torch.device(device)
    if where.type != "cuda":
        return models
    room = int(SHARE * torch.cuda.mem_get_info(where)[0])
    a, b = (DeviceTensors(weights, device, dtype, room) for weights in models)
    return a, b
