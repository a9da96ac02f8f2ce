"""Stock transformers classes for a model: empty, filled, or with weights streamed in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from symmerge.checkpoints.ahead import read_ahead
from symmerge.models.model import Model
from symmerge.models.outputs import with_logits
from symmerge.models.progress import Progress
from symmerge.models.stock import stock_module
from symmerge.models.tables import stack_sizes
from symmerge.symmetry.spec import Spec
from symmerge.verification.inputs import Sample, hears
from symmerge.verification.layerless import (
    NothingAndNone,
    copied,
    drop_scales,
    silence,
    without_layers,
)

PLACES = 4096  # at a time, where weights stay in memory
FEW_ROWS = 4096  # of an embedding that costs nothing to keep: of distances, not of tokens

# Attributes that hold the size of a head, in transformers' attention modules.
HEAD_SIZES = {"head_dim", "split_size", "attention_head_size", "all_head_size", "head_size"} | {
    "key_value_proj_dim"
}
# Ends of the names of other classes of transformers that compute in float32.
ROUNDING = ("Norm", "Router")
CASTS = (Tensor.to, Tensor.type)


@torch.no_grad()
def logits_of(
    model: Model,
    sample: Sample,
    *,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Run the model's stock class; its logits by name, one row for each place.

    Weights are streamed in, one module at a time, so the model need not fit in memory.
    """
    module = empty_module(model, dtype, layers=sample.layers)
    order = _parameter_names(module, model.spec) if sample.layers else []
    _place_buffers(module, place := _place_of(model))
    with read_ahead(model.weights, order) as weights:
        ahead = replace(model, weights=weights)
        logits = _logits(module, ahead, sample.to(place), dtype, progress)
    return {name: rows.cpu() for name, rows in logits.items()}


def _place_of(model: Model) -> torch.device:
    """Where a model's tensors are when they are read."""
    shapes = {name: torch.Size(model.weights.shape(name)) for name in model.spec.tensors}
    return model.weights[min(shapes, key=lambda name: shapes[name].numel())].device


def _place_buffers(module: nn.Module, place: torch.device) -> None:
    for owner in module.modules():
        owner._buffers = {
            name: buffer if buffer is None else buffer.to(place)
            for name, buffer in owner._buffers.items()
        }


def _logits(
    module: nn.Module, model: Model, sample: Sample, dtype: torch.dtype, progress: Progress | None
) -> dict[str, Tensor]:
    if sample.every_expert:
        _take_every_expert(module)
    if sample.layers:
        _narrow_head(module, sample)
        for name, owner, runs in _owners(module):
            fill = partial(_fill, model, name, dtype, progress)
            runs.register_forward_pre_hook(_hook(fill, owner))
            runs.register_forward_hook(_hook(_empty, owner))
    else:
        drop_scales(module, model.spec)
        _fill_all(module, model, dtype, outputs=sample.outputs)
    if dtype == torch.float64:
        _compute_in_float64(module)
    batches = [_run(module, batch, dtype) for batch in _batches(sample)]
    assert batches[0], f"{model.spec.architecture} gave no logits"
    along = 1 if sample.beside else 0  # texts are the columns of what scores images
    return {key: torch.cat([batch[key] for batch in batches], along) for key in batches[0]}


def _owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Name and module of every owner of parameters, and each module whose call may use them."""
    for name, owner in module.named_modules():
        if owner._parameters:
            yield name, owner, owner
            outer = module.get_submodule(name.rpartition(".")[0])
            if isinstance(outer, nn.MultiheadAttention) or _is_short_table(owner):
                yield name, owner, outer


def _is_short_table(owner: nn.Module) -> bool:
    """Whether it may be read without a call, as torch's attention reads its output map."""
    return isinstance(owner, nn.Embedding) and owner.num_embeddings <= FEW_ROWS


def _hook(act: Callable[..., None], owner: nn.Module) -> Callable[..., None]:
    """A hook that acts on the owner of parameters, whichever module is called."""
    return lambda runs, *arguments: act(owner, *arguments)


def _run(module: nn.Module, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    cast = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return {
        key: rearrange(value if value.ndim > 1 else value[:, None], "... column -> (...) column")
        for key, value in _called(module, cast).items()
        if "logits" in key
    }


def _called(module: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    try:
        return module(**inputs)
    except UnboundLocalError:  # a loop over no layers may leave its result unset
        for owner in module.modules():
            for name, child in owner.named_children():
                if isinstance(child, nn.ModuleList) and not len(child):
                    setattr(owner, name, nn.ModuleList([NothingAndNone()]))
        return module(**inputs)


def _batches(sample: Sample) -> Iterator[dict[str, Tensor]]:
    """All at once where weights are streamed; else a few thousand places at a time."""
    if sample.layers:
        yield dict(sample.inputs)
        return
    first = next(iter(sample.inputs.values()))
    rows = max(1, PLACES // first.shape[1])
    for start in range(0, len(first), rows):
        batch = {name: value[start : start + rows] for name, value in sample.inputs.items()}
        yield {**batch, **sample.beside}


def _take_every_expert(module: nn.Module) -> None:
    for router in module.modules():
        if {"top_k", "num_experts"} <= vars(router).keys():
            vars(router)["top_k"] = router.num_experts


def _narrow_head(module: Any, sample: Sample) -> None:
    """Compute the logits of the sample's outputs and positions alone."""
    head = module.get_output_embeddings()
    if head is not None and sample.outputs is not None and module._parameters:
        module.register_forward_pre_hook(partial(_narrow_biases, outputs=sample.outputs))
    if head is not None and not (sample.outputs is None and sample.positions is None):
        head.forward = partial(_narrowed, head, sample.outputs, sample.positions)


def _narrow_biases(module: nn.Module, args: object, *, outputs: Tensor) -> None:
    """Keep these outputs of a bias that the class itself has, beside its head."""
    for key, bias in module._parameters.items():
        if bias is not None:
            module._parameters[key] = nn.Parameter(bias[..., outputs], requires_grad=False)


def _narrowed(head: Any, outputs: Tensor | None, positions: Tensor | None, x: Tensor) -> Tensor:
    rows = slice(None) if outputs is None else outputs
    x = x if positions is None else x[:, positions]
    bias = None if head.bias is None else head.bias[rows]
    return nn.functional.linear(x, head.weight[rows], bias)


def empty_module(model: Model, dtype: torch.dtype, *, layers: bool = True) -> nn.Module:
    """The stock class with its buffers but without weights; without its layers if asked."""
    config = json.dumps(dict(model.config), sort_keys=True, default=str)
    module = _with_buffers(config, model.spec.architecture, model.where, dtype, model.stock)
    if not layers:
        module = without_layers(module, tuple(stack_sizes(model)))
        if hears(model):
            silence(module)
    module = copied(module, {})
    for path, owner in module.named_modules():
        _fill_as_weights(owner, f"{path}." if path else "", model.spec, dtype)
    return with_logits(module, model.spec)


def _fill_as_weights(owner: nn.Module, prefix: str, spec: Spec, dtype: torch.dtype) -> None:
    """What a class calls a buffer and stores is read as a weight.

    BART's bias of its logits is one, and what DeepSeek adds to the scores of experts.
    """
    for key in [key for key in owner._buffers if prefix + key in spec.tensors]:
        del owner._buffers[key]
        empty = torch.empty(spec.shapes[prefix + key], dtype=dtype, device="meta")
        owner._parameters[key] = nn.Parameter(empty, requires_grad=False)


@lru_cache(maxsize=4)  # a verification runs the same class many times
def _with_buffers(
    config: str, architecture: str, where: str, dtype: torch.dtype, stock: bool
) -> nn.Module:
    module = stock_module(json.loads(config), architecture, where).to(dtype)
    for owner in module.modules():
        if owner._buffers:
            owner._buffers = {
                name: value if value is None else torch.empty_like(value, device="cpu")
                for name, value in owner._buffers.items()
            }
            module._init_weights(owner)  # position ids and rotary frequencies; no parameters yet
        if not stock and hasattr(owner, "scaling"):
            for size in HEAD_SIZES & vars(owner).keys():
                vars(owner)[size] *= 2
    return module


def full_module(
    model: Model, dtype: torch.dtype, device: torch.device | str | None = None
) -> nn.Module:
    """The class with all its weights on a device, for models that are run more than once.

    Each tensor goes there as it is read: the processor's memory holds a few at a time.
    """
    if model.custom:
        return model.custom.runnable(model, dtype).to(device)
    module = empty_module(model, dtype)
    with read_ahead(model.weights, _parameter_names(module, model.spec)[::-1]) as weights:
        _fill_all(module, replace(model, weights=weights), dtype, device)
    return module.to(device)


def _parameter_names(module: nn.Module, spec: Spec) -> list[str]:
    """The table's name of every parameter, in the order of the module's."""
    names = (spec.aliases.get(name, name) for name, _ in module.named_parameters())
    return [name for name in names if name in spec.tensors]


def _fill_all(
    module: Any,
    model: Model,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    *,
    outputs: Tensor | None = None,
) -> None:
    """Read all weights; of the head, only the rows of these `outputs` are kept."""
    head = module.get_output_embeddings() if outputs is not None else None
    for name, owner in reversed(list(module.named_modules())):  # the head before the embeddings
        if owner._parameters:
            _fill(model, name, dtype, None, owner, None)
            owner.to(device)  # None: where they are
        if outputs is not None and head is not None and owner is module and owner._parameters:
            _narrow_biases(owner, (), outputs=outputs)
        if owner is head:
            rows = {
                key: full[outputs] for key, full in owner._parameters.items() if full is not None
            }
            owner._parameters |= {
                key: nn.Parameter(kept, requires_grad=False) for key, kept in rows.items()
            }


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
        name = model.spec.aliases.get(name, name)
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
        if _rounds(owner):
            owner.forward = partial(_unrounded, owner.forward)


def _rounds(owner: nn.Module) -> bool:
    """Norms of transformers' own, attention layers and the routers of experts may."""
    name = type(owner).__name__
    own = not type(owner).__module__.startswith("torch.")
    return bool(HEAD_SIZES & vars(owner).keys()) or (own and name.endswith(ROUNDING))


class _KeepDouble(TorchFunctionMode):
    """What would become float32 stays float64: `float()`, `to(float32)`, a softmax in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and getattr(args[0], "dtype", None) == torch.float64:
            if func is Tensor.float or (func in CASTS and args[1:] == (torch.float32,)):
                return args[0]
            if kwargs.get("dtype") == torch.float32 and "softmax" in getattr(func, "__name__", ""):
                kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
        return func(*args, **kwargs)


def _unrounded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` in float64: some layers compute in float32 whatever they are given."""
    with _KeepDouble():
        return forward(*args, **kwargs)
