"""Stock transformers classes for a model: empty, filled, or with weights streamed in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from symmerge.models.model import Model, Progress
from symmerge.models.pooled_logits import with_pooled_logits
from symmerge.models.stock import stock_module

# Attributes that hold the size of a head, in transformers' attention modules.
HEAD_SIZES = {"head_dim", "split_size", "attention_head_size", "all_head_size", "head_size"}


@torch.no_grad()
def logits_of(
    model: Model,
    inputs: dict[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Run the model's stock class; return all its logits tensors, in float64.

    Weights are streamed in, one module at a time, so the model need not fit in memory.
    """
    module = empty_module(model, dtype)
    for name, owner in module.named_modules():
        if owner._parameters:
            owner.register_forward_pre_hook(partial(_fill, model, name, dtype, progress))
            owner.register_forward_hook(_empty)
    if dtype == torch.float64:
        _compute_in_float64(module)
    cast = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    logits = [value.double() for key, value in module(**cast).items() if "logits" in key]
    assert logits, f"{model.spec.architecture} gave no logits"
    return logits


def empty_module(model: Model, dtype: torch.dtype) -> nn.Module:
    """The stock class with its buffers but without weights."""
    module = stock_module(model.config, model.spec.architecture, model.where).to(dtype)
    for owner in module.modules():
        if owner._buffers:
            owner._buffers = {
                name: value if value is None else torch.empty_like(value, device="cpu")
                for name, value in owner._buffers.items()
            }
            module._init_weights(owner)  # position ids and rotary frequencies; no parameters yet
        if not model.stock and hasattr(owner, "scaling"):
            for size in HEAD_SIZES & vars(owner).keys():
                vars(owner)[size] *= 2
    return with_pooled_logits(module, model.spec.pooled)


def full_module(model: Model, dtype: torch.dtype) -> nn.Module:
    """The stock class with all its weights in memory, for models that are run more than once."""
    module = empty_module(model, dtype)
    for name, owner in module.named_modules():
        if owner._parameters:
            _fill(model, name, dtype, None, owner, None)
    return module


def _fill(
    model: Model,
    prefix: str,
    dtype: torch.dtype,
    progress: Progress | None,
    owner: nn.Module,
    args: object,
) -> None:
    for key, empty in owner._parameters.items():
        name = f"{prefix}.{key}" if prefix else key
        name = model.spec.ties.get(name, name)
        if empty is None or name not in model.spec.tensors:
            continue
        owner._parameters[key] = nn.Parameter(model.weights[name].to(dtype), requires_grad=False)
        if "nf" in vars(owner) and key == "weight":  # transformers' Conv1D stores its width
            vars(owner)["nf"] = model.spec.shapes[name][1]
        if progress:
            progress(name)


def _empty(owner: nn.Module, args: object, output: object) -> None:
    for key, full in owner._parameters.items():
        if full is not None and not full.is_meta:
            empty = torch.empty_like(full, device="meta")
            owner._parameters[key] = nn.Parameter(empty, requires_grad=False)


def _compute_in_float64(module: nn.Module) -> None:
    """Keep float64 where transformers computes in float32 whatever the weights' precision."""
    for owner in module.modules():
        if owner._parameters and hasattr(owner, "variance_epsilon"):
            owner.forward = partial(_rms_norm, owner)
        if HEAD_SIZES & vars(owner).keys():
            owner.forward = partial(_unrounded, owner.forward)


class _KeepDouble(TorchFunctionMode):
    """`tensor.float()` leaves float64 as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def _unrounded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` in float64: some attention layers rotate queries and keys in float32."""
    with _KeepDouble():
        return forward(*args, **kwargs)


def _rms_norm(owner: Any, x: Tensor) -> Tensor:
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return owner.weight * (x * torch.rsqrt(mean_square + owner.variance_epsilon))
