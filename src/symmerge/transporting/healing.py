"""After carrying: OTHER learns TUNED's answers, in all weights or in the factors of an adapter.

What is carried is where it begins. The result is a model of its own, reported apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from symmerge.checkpoints.memory import freed_memory_kept
from symmerge.matching.learning.data import load_data
from symmerge.matching.optimization.loop import Hooks, Loop
from symmerge.merging.healing import Healed, Healer, HealOptions, heal
from symmerge.models.model import Model
from symmerge.models.progress import Phase, ProgressLike, reporter
from symmerge.transporting.adapter_files import Adapter, Factors
from symmerge.verification.modules import full_module

ADAPTER_RATE = 1.0  # times the rate at which all weights are healed


def heal_carried(
    carried: Model, tuned: Model, options: HealOptions, progress: ProgressLike = None
) -> Healed:
    """Distil TUNED into all weights of the carried model."""
    return heal(carried, [tuned], options=options, progress=progress)


@final
@dataclass(frozen=True)
class HealedAdapter:
    """An adapter whose factors learned, and the loss against TUNED's answers."""

    adapter: Adapter
    before: float
    after: float


@freed_memory_kept()
def heal_adapter(
    other: Model,
    adapter: Adapter,
    tuned: Model,
    options: HealOptions,
    progress: ProgressLike = None,
) -> HealedAdapter:
    """Distil TUNED into the factors of an adapter of OTHER; OTHER itself stays as it is."""
    options.check(other, 1)
    tell, how = reporter(progress), options.with_amounts(other)
    assert how.lr is not None
    tell(Phase("healing the adapter"))
    data = load_data(how, [tuned], tell)
    module = full_module(other, torch.float32)
    factors = {name: _attached(module, name, adapter) for name in adapter.modules}
    parameters = {
        f"{name}/{side}": value
        for name, factor in factors.items()
        for side, value in factor.named_parameters()
    }
    how = replace(how, lr=ADAPTER_RATE * how.lr)
    healer = Healer(other, how, data, (module, parameters))
    history = Loop(healer, healer.plan, Hooks(report=tell)).run_to_best()
    modules = {name: _learned(adapter.modules[name], name, healer.best) for name in factors}
    before = next(iter(history.losses))
    return HealedAdapter(replace(adapter, modules=modules), before, history.best_loss)


def _learned(factors: Factors, name: str, best: Mapping[str, Tensor]) -> Factors:
    new: dict[str, Any] = {
        side: best[f"{name}/{side}"].cpu().to(factors.b)
        for side in ("a", "b", "bias")
        if f"{name}/{side}" in best
    }
    return replace(factors, **new)


class _Weight(nn.Module):
    """A weight plus its low-rank change; the factors are the parameters."""

    def __init__(self, factors: Factors, turned: bool) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(side.float().clone()) for side in (factors.a, factors.b))
        self.scale, self.turned = factors.scale, turned

    def forward(self, weight: Tensor) -> Tensor:
        product = self.scale * self.b @ self.a
        return weight + (product.mT if self.turned else product)


class _Bias(nn.Module):
    """A bias plus that of the second factor."""

    def __init__(self, owner: _Weight) -> None:
        super().__init__()
        self.owner = (owner,)  # not a child: its parameters are counted once

    def forward(self, bias: Tensor) -> Tensor:
        owner = self.owner[0]
        return bias + owner.scale * owner.get_parameter("bias")


def _attached(module: nn.Module, name: str, adapter: Adapter) -> _Weight:
    child, factors = module.get_submodule(name), adapter.modules[name]
    turned = factors.embedding or name in adapter.transposed
    change = _Weight(factors, turned)
    parametrize.register_parametrization(child, "weight", change, unsafe=True)
    if factors.bias is not None and getattr(child, "bias", None) is not None:
        change.bias = nn.Parameter(factors.bias.float().clone())
        parametrize.register_parametrization(child, "bias", _Bias(change), unsafe=True)
    return change
