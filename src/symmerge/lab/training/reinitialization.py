"""Re-initialise a component of a trained model, as in "Functional Equivalence in Attention"."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from symmerge.checkpoints.files import read_json
from symmerge.checkpoints.pretrained import from_local
from symmerge.errors import CheckpointError, MismatchError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPONENTS = ("first-attention", "attention", "first-layer", "everything")
# The norm after attention is excluded: it belongs to the residual stream.
_ENCODER = (r"encoder\.layer\.(\d+)\.", r"attention\.(self|output\.dense)\.")
_STACK = r"layers\.(\d+)\."
_DECODERS = (
    *("llama", "mistral", "qwen2", "granite", "qwen3", "phi3"),
    *("starcoder2", "stablelm", "olmo2", "olmo3"),
)
# model type -> patterns of a layer's name, and of attention within it
MODULES = {
    "gpt2": (r"h\.(\d+)\.", r"attn\."),
    "gpt_neox": (_STACK, r"attention\."),
    **dict.fromkeys(_DECODERS, (_STACK, r"self_attn\.")),
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "roformer": _ENCODER,
    "vit": (_STACK, r"attention\."),
    "dinov3_vit": (r"layer\.(\d+)\.", r"attention\."),
}


def fresh_parameters(model: PreTrainedModel, component: str) -> list[str]:
    """Names of the parameters of a component."""
    if component not in COMPONENTS:
        raise MismatchError(f"component {component}: choose one of {', '.join(COMPONENTS)}")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if component == "everything":
        return names
    kind = model.config.model_type
    if kind not in MODULES:
        raise UnsupportedModel(
            f"which parameters of a {kind} are attention is unknown;"
            f" it is known of {', '.join(MODULES)}"
        )
    layer, attention = MODULES[kind]
    pattern = re.compile(rf"(?:^|\.){layer}{attention if 'attention' in component else ''}")
    layers = {name: int(match[1]) for name in names if (match := pattern.search(name))}
    return [name for name, at in layers.items() if at == 0 or not component.startswith("first")]


def reinitialize(folder: Path, component: str, seed: int) -> PreTrainedModel:
    """The model of a folder with a component re-initialised as its stock class does.

    Components: first-attention, attention, first-layer, everything.
    """
    model = open_model(folder)
    chosen = fresh_parameters(model, component)
    if not chosen:
        raise MismatchError(f"{folder} has no parameters in {component}: choose another component")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = dict(type(model)(model.config).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in chosen:
                parameter.copy_(fresh[name])
    return model


def open_model(folder: Path, architecture: str | None = None, **changes: object) -> PreTrainedModel:
    """A stock model in float32 from a folder, by default of the class that was saved."""
    import transformers
    from transformers.utils import logging

    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json: give the folder of a trained model")
    name = architecture or (read_json(folder / "config.json").get("architectures") or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise UnsupportedModel(f"{folder}: transformers has no class {name!r} of its config.json")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return from_local(kind, folder, dtype=torch.float32, **changes)
    finally:
        logging.enable_progress_bar() if shown else None
