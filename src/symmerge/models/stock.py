"""The stock transformers class of a model, without weights: can it be built and run?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from symmerge.checkpoints.files import RESTORE
from symmerge.errors import UnsupportedModel
from symmerge.families.base import pair
from symmerge.symmetry.spec import Spec, listing


def stock_module(config: Mapping[str, Any], architecture: str, where: str) -> Any:
    """The stock class on the meta device; a config that it cannot be built from is refused."""
    import transformers  # slow to import, and only needed here

    kind = getattr(transformers, architecture)
    with _refused(f"{where}: transformers cannot build {architecture} from config.json"):
        typed = kind.config_class.from_dict(dict(config))
        # Fields that change no function, only how it is computed and returned.
        typed.return_dict, typed.chunk_size_feed_forward = True, 0
        # SDPA keeps float64, which eager attention may round.
        typed._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
        with torch.device("meta"):
            return kind(typed).eval()


@torch.no_grad()
def check_stock(spec: Spec, config: Mapping[str, Any], where: str) -> None:
    """Refuse a config whose stock class has other tensors than the table, or cannot run.

    Nothing is computed: on the meta device, tensors have shapes only. 10 to 100 ms.
    """
    module = stock_module(config, spec.architecture, where)
    known = spec.shapes | {alias: spec.shapes[target] for alias, target in spec.ties.items()}
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
        try:
            module(**_smallest_input(module))
        except (RuntimeError, NotImplementedError) as error:
            # Code that looks at values cannot run here (RoFormer looks for padding).
            if "meta" not in str(error).lower():
                raise


def _smallest_input(module: Any) -> dict[str, torch.Tensor]:
    if module.main_input_name == "pixel_values":
        shape = (1, module.config.num_channels, *pair(module.config.image_size))
        return {"pixel_values": torch.empty(shape, device="meta")}
    return {"input_ids": torch.empty((1, 2), dtype=torch.int64, device="meta")}


@contextmanager
def _refused(problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch and transformers raise every kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnsupportedModel(f"{problem} ({reason}): {RESTORE}") from error
