"""Small stock modules by the name of their class or from a checkpoint's config, to derive from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmerge.checkpoints.hub import is_hub_name, local_folder
from symmerge.derivation.deriving import Derivation, derive
from symmerge.errors import UnsupportedModel
from symmerge.families.base import pair
from symmerge.models.progress import ProgressLike

ROWS, LENGTH = 3, 11  # of the example tokens: neither is a size of the small module
LAYERS, VOCABULARY, POSITIONS, PIXELS = 2, 101, 64, 4
EXPERTS = "_experts_implementation"  # setting of transformers
LARGEST = 20_000_000  # parameters of a module that is built here
SIDES = ("encoder", "decoder")
COUNTS = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys((f"num_{one}_layers" for one in SIDES), LAYERS),
    **dict.fromkeys((f"{one}_layers" for one in SIDES), LAYERS),
}
WIDTHS = ("hidden_size", "n_embd", "dim", "d_model", "word_embed_proj_dim", "embedding_size")
UNITS = (
    *("intermediate_size", "n_inner", "hidden_dim", "ffn_dim", "d_ff", "dff", "dim_ff"),
    *(f"{one}_ffn_dim" for one in SIDES),
)
HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads"),
    *(f"{one}_attention_heads" for one in SIDES),
    *(f"num_{one}_attention_heads" for one in SIDES),
)
HEAD_SIZE, MOST_HEADS, MOST_UNITS = 12, 4, 96


def derive_stock(source: str, *, seed: int = 0, progress: ProgressLike = None) -> Derivation:
    """Derive the table of a stock class, by its name or from a folder or hub name.

    The class is built small, since a table depends on no size: no weight of a checkpoint is read.
    """
    config, architecture = _config_of(source)
    module = _small_module(config, architecture)
    return derive(module, example_inputs(module), seed=seed, progress=progress)


def _config_of(source: str) -> tuple[dict[str, Any], str]:
    import transformers

    if not Path(source).exists() and hasattr(transformers, source):
        kind = getattr(transformers, source)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise UnsupportedModel(f"{source} is not a model class of transformers: give one")
        return {}, source
    folder = local_folder(source) if is_hub_name(source) and not Path(source).exists() else source
    try:
        config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
        return config, config["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UnsupportedModel(
            f"{source} is neither a class of transformers nor a folder whose config.json names one"
            f" ({type(error).__name__}): give the name of a class"
        ) from error


def _small_module(config: Mapping[str, Any], architecture: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, architecture, None)
    if kind is None or getattr(kind, "config_class", None) is None:
        raise UnsupportedModel(
            f"{architecture} is not a model class of the installed transformers: for your own"
            " module, call sm.derive(module, example_inputs)"
        )
    try:
        full = kind.config_class.from_dict(dict(config)).to_dict()
        small = {**full, **_shrunk(full), "use_cache": False}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with torch.device("meta"):
                _check_small(kind(kind.config_class.from_dict(small)))
            built = kind(kind.config_class.from_dict(small)).eval()
        # others choose experts by values, or multiply in float32 alone
        setattr(built.config, EXPERTS, "batched_mm")
        return built
    except UnsupportedModel:
        raise
    except Exception as error:  # transformers raises every kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnsupportedModel(
            f"{architecture} cannot be built small ({reason}): build it yourself, and call"
            " sm.derive(module, example_inputs)"
        ) from error


def _check_small(module: nn.Module) -> None:
    """Refuse a class whose sizes have other names than those we know."""
    count = sum(one.numel() for one in module.parameters())
    if count > LARGEST:
        raise UnsupportedModel(
            f"{type(module).__name__} cannot be built small: its config names its sizes otherwise,"
            f" and {count:,} parameters are too many; build it yourself, and call"
            " sm.derive(module, example_inputs)"
        )


def _shrunk(full: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a small module of the same class."""
    small: dict[str, Any] = {name: size for name, size in COUNTS.items() if full.get(name)}
    heads = next((full[name] for name in HEADS if isinstance(full.get(name), int)), MOST_HEADS)
    few = min(heads, MOST_HEADS)
    small |= dict.fromkeys((name for name in HEADS if full.get(name)), few)
    small |= dict.fromkeys((name for name in WIDTHS if full.get(name)), few * HEAD_SIZE)
    small |= dict.fromkeys((name for name in UNITS if full.get(name)), MOST_UNITS)
    if shared := full.get("num_key_value_heads"):
        small["num_key_value_heads"] = max(1, few * shared // heads)
    small |= dict.fromkeys((name for name in ("head_dim", "dim_head") if full.get(name)), HEAD_SIZE)
    if full.get("rotary_dim"):
        small["rotary_dim"] = HEAD_SIZE // 2 // 2 * 2
    if full.get("layer_types"):
        small["layer_types"] = full["layer_types"][:LAYERS]
    if isinstance(full.get("num_heads"), list | tuple):  # one for each stage
        small |= {"depths": [LAYERS] * LAYERS, "num_heads": [few] * LAYERS}
        small |= {"embed_dim": few * HEAD_SIZE, "window_size": PIXELS // 2}
        small |= dict.fromkeys(("out_features", "out_indices"))  # of stages that are left out
    if full.get("patch_size"):
        small |= {"patch_size": PIXELS, "image_size": 4 * PIXELS}
    if full.get("sliding_window"):
        small["sliding_window"] = LENGTH - 3
    tokens = {name for name in full if name.endswith("_token_id") and full[name] is not None}
    return small | dict.fromkeys((one for one in tokens if full[one] != -1), 0)


def example_inputs(module: Any) -> dict[str, torch.Tensor]:
    """Random tokens or pixels, as the class takes them."""
    generator, config = torch.Generator().manual_seed(0), module.config
    if module.main_input_name == "pixel_values" and getattr(config, "image_size", None):
        shape = (ROWS, config.num_channels, *pair(config.image_size))
        return {"pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}
    if module.main_input_name != "input_ids" or not getattr(config, "vocab_size", None):
        raise UnsupportedModel(
            f"{type(module).__name__}: its {module.main_input_name} cannot be made here, where its"
            " config names no vocabulary and no size of pictures: build it yourself, and call"
            " sm.derive(module, example_inputs)"
        )
    rows = config.vocab_size - 1
    tokens = torch.randint(rows, (ROWS, LENGTH), generator=generator) + 1
    inputs = {"input_ids": tokens}
    return inputs | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})
