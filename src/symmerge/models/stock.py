"""The stock transformers class of a model, without weights: can it be built and run?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import torch

from symmerge.checkpoints.files import RESTORE
from symmerge.errors import UnsupportedModel
from symmerge.families.base import pair
from symmerge.symmetry.spec import Spec, listing


def stock_module(config: Mapping[str, Any], architecture: str, where: str) -> Any:
    """The stock class on the meta device; a config that it cannot be built from is refused."""
    with _refused(f"{where}: transformers cannot build {architecture} from config.json"):
        return _build(config, architecture)


def _build(config: Mapping[str, Any], architecture: str) -> Any:
    import transformers  # slow to import, and only needed here

    kind = getattr(transformers, architecture)
    typed = kind.config_class.from_dict(dict(config))
    # Fields that change no function, only how it is computed and returned.
    typed.return_dict, typed.chunk_size_feed_forward = True, 0
    # SDPA keeps float64, which eager attention may round.
    typed._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    typed._experts_implementation = "eager"  # others multiply in bfloat16 alone
    with torch.device("meta"):
        return kind(typed).eval()


def check_stock(spec: Spec, config: Mapping[str, Any], where: str) -> None:
    """Refuse a config whose stock class has other tensors than the table, or cannot run.

    Nothing is computed: on the meta device, tensors have shapes only. 10 to 100 ms for the first
    checkpoint with this config, nothing for others.
    """
    content = json.dumps(dict(config), sort_keys=True)
    with _refused(f"{where}: transformers cannot build {spec.architecture} from config.json"):
        module = _shared(content, spec.architecture)
    known = spec.shapes | {alias: spec.shapes[target] for alias, target in spec.aliases.items()}
    odd = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in module.named_parameters(remove_duplicate=False)
        if known.get(name) != tuple(tensor.shape)
    ]
    if odd:
        raise UnsupportedModel(
            f"{where}: as config.json describes it, {spec.architecture} has tensors that this"
            f" checkpoint has not: {listing(odd)}; {RESTORE}"
        )
    with _refused(f"{where}: transformers cannot run {spec.architecture} with config.json"):
        _run_stock(content, spec.architecture)


@lru_cache(maxsize=4)  # both models of a pair have the same config, and so has what is written
def _shared(config: str, architecture: str) -> Any:
    return _build(json.loads(config), architecture)


@lru_cache(maxsize=4)
@torch.no_grad()
def _run_stock(config: str, architecture: str) -> None:
    """Run the class on the meta device; returns if it can be run."""
    module = _shared(config, architecture)
    try:
        module(**_smallest_input(module))
    except (RuntimeError, NotImplementedError) as error:
        # Code that looks at values cannot run here (RoFormer looks for padding).
        if "meta" not in str(error).lower():
            raise


def _smallest_input(module: Any) -> dict[str, torch.Tensor]:
    inputs, config = {}, module.config
    towers = hasattr(config, "vision_config")  # else what one class reads, others may not
    both = towers and {"image", "text"} <= {*module.input_modalities}
    if both or module.main_input_name == "pixel_values":
        seen = config.vision_config if towers else config
        shape = (1, seen.num_channels, *pair(seen.image_size))
        inputs["pixel_values"] = torch.empty(shape, device="meta")
    if module.main_input_name == "input_features":
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
        inputs["input_features"] = torch.empty(shape, device="meta")
    tokens = torch.empty((1, 2), dtype=torch.int64, device="meta")
    if both or not inputs:
        inputs["input_ids"] = tokens
    if "decoder_input_ids" in signature(module.forward).parameters:
        inputs["decoder_input_ids"] = tokens
    return inputs


@contextmanager
def _refused(problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch and transformers raise every kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnsupportedModel(f"{problem} ({reason}): {RESTORE}") from error
