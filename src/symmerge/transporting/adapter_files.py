"""LoRA adapters in the format of peft: read, checked against a model, and written."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from symmerge.checkpoints.files import read_json, write_json
from symmerge.checkpoints.folders import new_folder
from symmerge.checkpoints.weights import is_finite
from symmerge.errors import CheckpointError, MismatchError, SymmergeWarning, shown
from symmerge.models.model import Model
from symmerge.models.stock import stock_module
from symmerge.symmetry.spec import listing

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
FACTOR = re.compile(r"^(.+)\.lora_(?:(A|B)\.(weight|bias)|embedding_(A|B))$")
MERGE = "merge it into its base (PeftModel.merge_and_unload) and carry the model"
# Options under which weights are more than a sum of the base and B A.
REFUSED = {
    **dict.fromkeys(("use_dora", "use_qalora", "use_bdlora", "kasa_config"), "no plain product"),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices"), "whole tensors beside it"),
    **dict.fromkeys(("layer_replication", "target_parameters"), "parameters of its own kind"),
    **dict.fromkeys(("arrow_config", "monteclora_config"), "no plain product"),
}
# Kinds that are trained beside the weights, and so cannot be merged into them.
BESIDE = ("PROMPT", "P_TUNING", "PREFIX", "CPT", "CARTRIDGE", "ADAPTION", "XLORA")
# Ways to begin that leave another base behind, or a quantised one.
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@final
@dataclass(frozen=True)
class Factors:
    """A low-rank change of one module's weight: B A, and a bias; `scale` is alpha / r."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float
    bias: Tensor | None = None  # of the second factor
    embedding: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@final
@dataclass(frozen=True, repr=False)
class Adapter:
    """A LoRA adapter: its config, and factors by module."""

    config: Mapping[str, Any]
    modules: Mapping[str, Factors]
    path: Path | None = None
    dtype: torch.dtype = torch.float32
    transposed: frozenset[str] = field(default_factory=frozenset)  # stored as [in, out]

    def __repr__(self) -> str:
        ranks = sorted({factors.rank for factors in self.modules.values()})
        return f"<Adapter of {len(self.modules)} modules, ranks {listing(map(str, ranks))}>"

    def change(self, module: str) -> Tensor:
        """The change of a module's weight, laid out as it is stored."""
        factors = self.modules[module]
        product = factors.scale * factors.b @ factors.a
        return product.mT if factors.embedding or module in self.transposed else product


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (path / CONFIG).is_file()


def read_adapter(path: Path, base: Model) -> Adapter:
    """The adapter in a folder, for this base; refuses what is no plain LoRA of it."""
    config = read_json(path / CONFIG)
    _check_config(path, config)
    tensors = _tensors(path)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if odd := [name for name, tensor in tensors.items() if not is_finite(tensor.float())]:
        raise CheckpointError(
            f"{path}: {odd[0]} has entries that are NaN or infinite: train it again"
        )
    if odd := [dtype for dtype in dtypes if not dtype.is_floating_point]:
        raise CheckpointError(
            f"{path} is quantised ({odd[0]}): store the adapter in float16 or float32"
        )
    modules, layers = dict(base_modules(base)), dict(_collected(path, tensors, base))
    factors = {name: _factors(path, config, name, parts, base) for name, parts in layers.items()}
    transposed = frozenset(name for name in layers if modules.get(name) == "Conv1D")
    adapter = Adapter(config, factors, path, max(dtypes, key=lambda d: d.itemsize), transposed)
    _check_shapes(adapter, base)
    _warn_of_base(adapter, base)
    return adapter


def _warn_of_base(adapter: Adapter, base: Model) -> None:
    """Say so if the adapter's config names another base; folders may have been renamed."""
    named = adapter.config.get("base_model_name_or_path")
    if isinstance(named, str) and named and base.path and Path(named).name != base.path.name:
        warnings.warn(
            f"{adapter.path} was trained on {named}, as its config says, and --from is"
            f" {base.where}: carried as a change of the latter",
            SymmergeWarning,
            stacklevel=4,
        )


def base_modules(base: Model) -> Iterator[tuple[str, str]]:
    """The name and the class of each module of the stock class."""
    module = stock_module(base.config, base.spec.architecture, base.where)
    yield from ((name, type(child).__name__) for name, child in module.named_modules())


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if str(kind).removeprefix("MULTITASK_").startswith(BESIDE):
        raise MismatchError(
            f"{path} is an adapter of kind {shown(kind)}, which changes no weights: only LoRA and"
            " fine-tunes can be carried"
        )
    if kind != "LORA":
        raise MismatchError(f"{path} is an adapter of type {shown(kind)}, not LORA: {MERGE}")
    if odd := [name for name in REFUSED if config.get(name)]:
        raise MismatchError(f"{path}: '{odd[0]}' is set ({REFUSED[odd[0]]}): {MERGE}")
    if config.get("alora_invocation_tokens"):
        raise MismatchError(
            f"{path}: 'alora_invocation_tokens' is set, so it acts on some tokens only: train a"
            " plain LoRA"
        )
    if config.get("bias", "none") != "none":
        raise MismatchError(f"{path} trains biases of the base (bias={config['bias']!r}): {MERGE}")
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(OTHER_BASES):
        raise MismatchError(
            f"{path} began as {begin}, which changes or quantises its base: convert it to plain"
            " LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _tensors(path: Path) -> dict[str, Tensor]:
    remedy = "save it with PeftModel.save_pretrained(safe_serialization=True)"
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path / WEIGHTS} cannot be read ({error}): {remedy}") from error


def _collected(
    path: Path, tensors: Mapping[str, Tensor], base: Model
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The factors of each module."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(PREFIX)
        if match := FACTOR.match(short):
            module, factor, part, embedding = match.groups()
            key = f"{factor or embedding}.{part or 'embedding'}"
            modules.setdefault(module, {})[key] = tensor
        elif not _is_copy(short, tensor, base):
            raise MismatchError(f"{path}: {name} is not a LoRA factor: {MERGE}")
    if not modules:
        raise CheckpointError(f"{path / WEIGHTS} holds no LoRA factors: give another adapter")
    yield from modules.items()


def _is_copy(name: str, tensor: Tensor, base: Model) -> bool:
    """Whether this is the base's own tensor, which peft stores beside adapters of embeddings."""
    name = name.replace(".base_layer.", ".")
    name = base.spec.ties.get(name, name)
    return name in base.spec.tensors and torch.equal(base.weights[name].to(tensor.dtype), tensor)


def _factors(
    path: Path, config: Mapping[str, Any], module: str, parts: Mapping[str, Tensor], base: Model
) -> Factors:
    kinds = {key.partition(".")[0] for key in parts}
    name = f"{module}.weight"
    if ".base_layer" in module or max(part.ndim for part in parts.values()) > 2:
        raise MismatchError(
            f"{path} adapts {module.replace('.base_layer', '')}, a convolution or a whole"
            f" attention: {MERGE}"
        )
    if name not in base.spec.tensors and name not in base.spec.ties:
        raise MismatchError(
            f"{path} adapts {module}, which {base.where} ({base.spec.architecture}) does not have:"
            " give the base it was trained on"
        )
    if kinds != {"A", "B"}:
        raise CheckpointError(f"{path}: {module} has only one of its two factors: save it again")
    embedding = "A.embedding" in parts
    which = "embedding" if embedding else "weight"
    a, b = (parts[f"{side}.{which}"] for side in "AB")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.numel():
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise CheckpointError(f"{path}: the factors of {module} do not fit: {shapes}")
    a, b = (side.to(base.weights[base.spec.ties.get(name, name)].dtype) for side in (a, b))
    bias = parts.get("B.bias")
    rank = a.shape[0]
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    try:
        scale = float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
    except (TypeError, ValueError):
        raise CheckpointError(f"{path / CONFIG}: alpha is {shown(alpha)}, not a number") from None
    return Factors(a, b, scale, None if bias is None else bias.to(b.dtype), embedding)


def _pattern(patterns: object, module: str, usual: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as in peft."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error:
            raise CheckpointError(f"{CONFIG}: {shown(pattern)} is not a pattern of names") from None
    return usual


def _check_shapes(adapter: Adapter, base: Model) -> None:
    changes = False
    for module, factors in adapter.modules.items():
        name = base.spec.ties.get(f"{module}.weight", f"{module}.weight")
        expected, change = base.spec.shapes[name], adapter.change(module)
        if tuple(change.shape) != expected:
            raise MismatchError(
                f"{adapter.path}: the change of {module} is {list(change.shape)},"
                f" and its weight in {base.where} {list(expected)}: give the base it was trained on"
            )
        changes |= bool(change.any() or (factors.bias is not None and factors.bias.any()))
    if not changes:
        raise MismatchError(
            f"{adapter.path} changes nothing (all its products are zero): train it first"
        )


def save_adapter(
    adapter: Adapter,
    target: Path,
    *,
    overwrite: bool = False,
    inputs: tuple[Path, ...] = (),
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write an adapter that peft loads. The folder appears complete or not at all.

    `beside` may write more files into the folder.
    """
    tensors: dict[str, Tensor] = {}
    for module, factors in adapter.modules.items():
        names = [f"embedding_{side}" if factors.embedding else f"{side}.weight" for side in "AB"]
        tensors |= {
            f"{PREFIX}{module}.lora_{name}": value.to(adapter.dtype).contiguous()
            for name, value in zip(names, (factors.a, factors.b), strict=True)
        }
        if factors.bias is not None:
            tensors[f"{PREFIX}{module}.lora_B.bias"] = factors.bias.to(adapter.dtype).contiguous()
    needs = sum(tensor.nbytes for tensor in tensors.values())
    with new_folder(target, overwrite=overwrite, needs_bytes=needs, inputs=inputs) as folder:
        try:
            save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write {target}: {error}") from error
        write_json(folder / CONFIG, json.loads(json.dumps(dict(adapter.config))))
        if beside:
            beside(folder)
    return target
