"""Does a model compute what another does? The gate before anything is written, and a check of its own.

Models run through the stock transformers classes with weights streamed in module by module, so that a checkpoint larger than
memory can be verified. Logits are compared up to what a softmax ignores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from symmerge.errors import FunctionChanged, MismatchError
from symmerge.models.model import Model, Progress
from symmerge.models.pooled_logits import answering
from symmerge.symmetry.spec import listing

# Storing the weights in a precision changes this much at most, measured over all families and five seeds: 4.6e-15, 2.0e-6, 2.0e-3 and
# 1.2e-2; with room to spare. Independently trained models differ by 0.25 and more.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TOKENS, IMAGES = (2, 48), 2
HEAD_SIZES = {
    "head_dim",
    "split_size",
    "attention_head_size",
    "all_head_size",
    "head_size",
}  # what attention modules call them


@dataclass(frozen=True)
class Verdict:
    """How far two models' logits are apart, and whether that is rounding."""

    same: bool
    difference: float
    largest: float
    tolerance: float
    dtype: str
    inputs: str

    def record(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    a: Model,
    b: Model,
    *,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Compare the logits of two models on the same random inputs.

    `difference` is |logits A - logits B| / |logits A| after taking out what a softmax ignores. The default tolerance is that of
    the coarser stored precision. In float64 the norms that transformers computes in float32 are computed in float64.
    """
    _comparable(a, b)
    inputs = example_inputs(a, seed)
    first, second = (logits_of(model, inputs, dtype=dtype, progress=progress) for model in (a, b))
    shape = "x".join(str(n) for n in next(iter(inputs.values())).shape)
    kind = "pixels" if "pixel_values" in inputs else "tokens"
    return judge(
        a,
        b,
        first,
        second,
        dtype=dtype,
        tolerance=tolerance,
        inputs=f"{shape} random {kind}, seed {seed}",
    )


def judge(
    a: Model,
    b: Model,
    first: list[Tensor],
    second: list[Tensor],
    *,
    dtype: torch.dtype,
    tolerance: float | None = None,
    inputs: str,
) -> Verdict:
    """Whether logits of two models are the same but for rounding, and for what a softmax ignores."""
    pairs = [(_visible(a, x), _visible(b, y)) for x, y in zip(first, second, strict=True)]
    stored = max((a.dtype, b.dtype, dtype), key=lambda kind: torch.finfo(kind).eps)
    tolerance = TOLERANCE[stored] if tolerance is None else tolerance
    difference = max(((x - y).norm() / x.norm().clamp_min(1e-30)).item() for x, y in pairs)
    largest = max((x - y).abs().max().item() for x, y in pairs)
    return Verdict(
        difference <= tolerance,
        difference,
        largest,
        tolerance,
        str(stored).removeprefix("torch."),
        inputs,
    )


def gate(
    source: Model, *, progress: Progress | None = None, compare: Callable[..., Verdict] = verify
):
    """A gate for `save`: the written checkpoint must compute what `source` does, or nothing is written. `compare` may replace `verify`."""

    def check(written: Model) -> dict[str, Any]:
        verdict = compare(source, written, progress=progress)
        if not verdict.same:
            raise FunctionChanged(
                f"refused: the new checkpoint does not compute what {source.where} does (relative difference {verdict.difference:.1e},"
                f" tolerance {verdict.tolerance:.0e}); nothing was written. This is a bug or an ill-conditioned element: please report it"
            )
        return verdict.record()

    return check


def _comparable(a: Model, b: Model) -> None:
    """Refuse models of another class, depth or vocabulary. Hidden spaces do not count: a narrow model and its widened twin are one function."""
    fields = {
        "class": (a.spec.architecture, b.spec.architecture),
        "layers": (_layers(a), _layers(b)),
    }
    visible = [
        name
        for name in a.spec.spaces
        if name in b.spec.spaces and name not in a.spec.hidden and name not in b.spec.hidden
    ]
    fields |= {name: (a.spec.sizes[name], b.spec.sizes[name]) for name in visible}
    differing = [f"{name} {x} / {y}" for name, (x, y) in fields.items() if x != y]
    if differing:
        raise MismatchError(
            f"{a.where} and {b.where} cannot be compared; they differ in: {listing(differing, 6)}"
        )


def _layers(model: Model) -> int:
    return sum(name.startswith("ff.") for name in model.spec.spaces)


def example_inputs(model: Model, seed: int) -> dict[str, Tensor]:
    """The same random inputs for the same seed: tokens, or pixels."""
    generator = torch.Generator().manual_seed(seed)
    sizes = model.spec.sizes
    if "channel" in sizes:
        side = model.config.get("image_size", 224)
        height, width = (side, side) if isinstance(side, int) else side
        return {
            "pixel_values": torch.randn(
                IMAGES, sizes["channel"], height, width, generator=generator
            )
        }
    rows, length = TOKENS
    length = min(
        length, sizes.get("position", length + 2) - 2
    )  # RoBERTa's first two positions are reserved
    tokens = torch.randint(0, sizes["vocabulary"], (rows, length), generator=generator)
    padding = model.config.get("pad_token_id")
    return {
        "input_ids": torch.where(tokens == padding, (tokens + 1) % sizes["vocabulary"], tokens)
        if padding is not None
        else tokens
    }


def _visible(model: Model, logits: Tensor) -> Tensor:
    """Logits less what a softmax ignores; features, regression and multi-label heads are compared as they are."""
    kind = model.config.get("problem_type")
    if (
        logits.shape[-1] == 1
        or model.spec.task == "image-features"
        or kind in ("regression", "multi_label_classification")
    ):
        return logits
    return logits - logits.mean(-1, keepdim=True)


@torch.no_grad()
def logits_of(
    model: Model,
    inputs: dict[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Every logits tensor the model's class gives, with weights streamed in: at most one module's are in memory at a time."""
    module = empty_module(model, dtype)
    owners = [(name, owner) for name, owner in module.named_modules() if owner._parameters]
    for name, owner in owners:
        owner.register_forward_pre_hook(partial(_fill, model, name, dtype, progress))
        owner.register_forward_hook(_empty)
        if dtype == torch.float64 and hasattr(owner, "variance_epsilon"):
            owner.forward = partial(_rms_norm, owner)  # transformers computes this norm in float32
    if dtype == torch.float64:
        for owner in module.modules():
            if HEAD_SIZES & vars(owner).keys():
                owner.forward = partial(_unrounded, owner.forward)
    cast = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    output = module(**cast)
    found = [value for key, value in output.items() if "logits" in key]
    assert found, f"{model.spec.architecture} gave no logits"
    return [value.double() for value in found]


def empty_module(model: Model, dtype: torch.dtype) -> nn.Module:
    """The stock class with its buffers but without weights."""
    import transformers

    architecture = getattr(transformers, model.spec.architecture)
    config = architecture.config_class.from_dict(dict(model.config))
    config._attn_implementation = (
        "sdpa" if architecture._supports_sdpa else "eager"
    )  # keeps float64, which eager ones may round
    with torch.device("meta"):
        module = architecture(config).to(dtype).eval()
    for owner in module.modules():
        if owner._buffers:
            owner._buffers = {
                name: value if value is None else torch.empty_like(value, device="cpu")
                for name, value in owner._buffers.items()
            }
            module._init_weights(
                owner
            )  # fills position ids and rotary frequencies; parameters are still empty
        if not model.stock and hasattr(owner, "scaling"):
            for size in HEAD_SIZES & vars(owner).keys():
                vars(owner)[size] *= 2
    return answering(module, model.spec.pooled)


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
    args: Any,
) -> None:
    for key, empty in owner._parameters.items():
        name = f"{prefix}.{key}" if prefix else key
        name = model.spec.ties.get(name, name)
        if empty is None or name not in model.spec.tensors:
            continue
        owner._parameters[key] = nn.Parameter(model.weights[name].to(dtype), requires_grad=False)
        if (
            "nf" in vars(owner) and key == "weight"
        ):  # transformers' transposed linear map remembers its width
            vars(owner)["nf"] = model.spec.shapes[name][1]
        if progress:
            progress(name)


def _empty(owner: nn.Module, args: Any, output: Any) -> None:
    for key, full in owner._parameters.items():
        if full is not None and not full.is_meta:
            owner._parameters[key] = nn.Parameter(
                torch.empty_like(full, device="meta"), requires_grad=False
            )


class _KeepDouble(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            args[0]
            if func is Tensor.float and args[0].dtype == torch.float64
            else func(*args, **(kwargs or {}))
        )


def _unrounded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Some attention layers turn their queries and keys in float32, whatever the precision."""
    with _KeepDouble():
        return forward(*args, **kwargs)


def _rms_norm(owner: Any, x: Tensor) -> Tensor:
    return owner.weight * (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + owner.variance_epsilon)
    )
