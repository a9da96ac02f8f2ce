"""A stock class without its layers: what every symmetry preserves, at the cost of a few rows."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from symmerge.symmetry.notation import Role
from symmerge.symmetry.spec import Spec, layer_of


def copied(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """A copy with the same config, and the same tensors until they are replaced."""
    # 0.2 ms against 2 of deepcopy for two layers; a verification makes fifteen
    if id(module) not in copies:
        copy = copies[id(module)] = object.__new__(type(module))
        vars(copy).update(
            {
                name: value.copy() if isinstance(value, dict | set) else value
                for name, value in vars(module).items()
            }
        )
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copied(child, copies)
    return copies[id(module)]


@lru_cache(maxsize=4)
def without_layers(module: Any, counts: tuple[int, ...]) -> nn.Module:
    """Without the layers of its stacks, so that embeddings, norms and heads remain."""
    module = copied(module, {})
    for path, count in zip(_stacks(module, counts), counts, strict=True):
        # Layers that are run more than once are counted by the config alone.
        shared = len(counts) == 1 and count != module.config.num_hidden_layers
        nothing = nn.ModuleList([_Nothing() for _ in range(count if shared else 0)])
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, nothing)
    return module


def _stacks(module: nn.Module, counts: tuple[int, ...]) -> list[str]:
    """Where the layers of each stack are: lists of so many modules, none inside another."""
    lists = {
        path: len(child)
        for path, child in module.named_modules()  # outer ones first
        if isinstance(child, nn.ModuleList)
    }
    chosen: list[str] = []
    for count in counts:
        inside = tuple(f"{path}." for path in chosen)
        left = (path for path in lists if path not in chosen and not path.startswith(inside))
        chosen.append(next(path for path in left if lists[path] == count))
    return chosen


def silence(module: Any) -> None:
    """Leave out an encoder of sound: it needs seconds of it, and nothing reads it here."""
    module.get_encoder().forward = partial(_nothing_heard, module)


def _nothing_heard(module: Any, *args: object, **kwargs: object) -> Any:
    # slow to import, and only needed here
    from transformers.modeling_outputs import BaseModelOutput

    nothing: Any = torch.zeros(1, 1, module.config.hidden_size)
    return BaseModelOutput(last_hidden_state=nothing)


class _Nothing(nn.Module):
    """A layer that changes nothing."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return x


class NothingAndNone(nn.Module):
    """The same for layers that return their attention as well."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        return x, None


def drop_scales(module: nn.Module, spec: Spec) -> None:
    """Let the last norm keep the length of what it reads: right after an embedding it hides it.

    It remains what symmetries act on: a linear map with the norm's gain, shift and mean.
    """
    gains = [norm.gain for norm in spec.norms if norm.writer is None]
    if spec.shows_stream:  # nothing is folded there
        gains = [
            met.piece.tensor for met in spec.occurrences(spec.stream) if met.role is Role.RIDES
        ]
    for gain in gains:
        if layer_of(gain) is None:
            owner = module.get_submodule(gain.rpartition(".")[0])
            owner.forward = partial(_without_scale, owner)


def _without_scale(norm: Any, x: Tensor) -> Tensor:
    shift = getattr(norm, "bias", None)
    shift = torch.zeros_like(norm.weight) if shift is None else shift
    # Whatever it is called: T5's LayerNorm takes out no mean, so that a constant remains.
    constant = type(norm).forward(norm, torch.ones_like(x[..., :1, :])) - shift
    centres = constant.abs().max() <= norm.weight.abs().max() / 2
    return norm.weight * (x - x.mean(-1, keepdim=True) if centres else x) + shift
