"""What the values of a config may be: a table of rules, checked before a model is used.

transformers checks types. Ranges it leaves to torch, which fails when the class is built or run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from typing import Any

from symmerge.checkpoints.files import RESTORE
from symmerge.checkpoints.limits import LONGEST_SIDE, MOST_LABELS
from symmerge.checkpoints.weights import Weights
from symmerge.errors import UnsupportedModel, shown
from symmerge.families.spaces import ACTIVATIONS

LAYER_FIELDS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
    "depths",  # of stages
)
LABEL_FIELDS = ("num_labels", "_num_labels", "id2label", "label2id")
SHARED = frozenset(
    (
        *("sliding_window", "layer_types", "attention_chunk_size"),
        *("conv_act", "conv_groups", "conv_kernel_size"),  # DeBERTa's, to the end
        *("norm_rel_ebd", "position_buckets", "share_att_key"),
    )
)
"""Settings that classes read, and compute otherwise for, although their config declares none."""
UNDECLARED = SHARED | frozenset(
    (
        *("attention_head_size", "embedding_size", "head_dim", "hidden_size"),
        *("dense_act_fn", "partial_rotary_factor"),
        *(f"{part}_config" for part in ("text", "vision", "audio", "encoder", "decoder")),
    )
)
"""The same, with sizes and what is computed from other settings."""


@dataclass(frozen=True)
class Rule:
    """Fields whose whole name matches must hold an allowed value."""

    fields: str
    allowed: Callable[[Any], bool]
    expected: str


def _whole(value: object, low: int, high: int = 2**31 - 1) -> bool:
    return type(value) is int and low <= value <= high


def _number(value: object, low: float, high: float = 1e300) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high  # not so for NaN


def _sides(value: object) -> bool:
    both = value if isinstance(value, list | tuple) else (value, value)
    return len(both) == 2 and all(_whole(side, 1, LONGEST_SIDE) for side in both)


def _each(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple) else [value]


def _counts(value: object) -> bool:
    return all(_whole(one, 1) for one in _each(value))


def _ids(value: object) -> bool:
    return all(_whole(one, -(2**31)) for one in _each(value))


def _flags(value: object) -> bool:
    return isinstance(value, list) and all(_whole(one, 0, 1) for one in value)


RULES = (
    Rule(
        r"(hidden_)?activation|(hidden|pooler|pooler_hidden|conv)_act|activation_function"
        r"|classifier_activation|dense_act_fn",
        lambda value: isinstance(value, str) and value in ACTIVATIONS,
        f"one of {', '.join(sorted(ACTIVATIONS))}",
    ),
    Rule(
        r".*dropout.*|.*_pdrop|drop_path_rate|partial_rotary_factor|rotary_pct",
        lambda value: _number(value, 0.0, 1.0),
        "a number from 0 to 1",
    ),
    Rule(r".*_(eps|epsilon)", lambda value: _number(value, 0.0), "a finite number from 0 up"),
    Rule(r"rope_theta|.*_rope_theta", lambda value: _number(value, 1e-30), "a positive number"),
    Rule(r"depths|num_heads", _counts, "a positive whole number, or one for each stage"),
    Rule(
        r"n_heads?|num_(attention|key_value)_heads|head_dim|n_embd|dim|hidden_size|vocab_size"
        r"|d_(model|kv|ff)|embed_dim|window_size",
        lambda value: _whole(value, 1),
        "a positive whole number",
    ),
    Rule(
        r"(n|num)_(?!labels|heads).*|(?!no_rope_|attention_layers|mlp_only_|use_|mscale_).*_(dim|position_embeddings|stride|layers|vocab_size)"
        r"|(embedding|intermediate|chunk)_size.*|sliding_window|local_attention",
        lambda value: _whole(value, 0),
        "a whole number from 0 up, within 32 bits",
    ),
    Rule(r"no_rope_layers", _flags, "a list of ones and zeros"),
    Rule(r"(image|patch)_size", _sides, f"one or two whole numbers of pixels, to {LONGEST_SIDE:,}"),
    Rule(
        r"(text|vision|audio|encoder|decoder)_config",
        lambda value: hasattr(value, "model_type"),  # else the class knows of no parts
        "a model of one part",
    ),
    Rule(r".*_token_id", _ids, "whole numbers within 32 bits"),
    Rule(
        r".*",
        lambda value: not isinstance(value, float) or isfinite(value),
        "a finite number",
    ),
)


def check_counts(config: Mapping[str, object], weights: Weights, where: str) -> None:
    """Refuse more layers or labels than the tensors allow, before anything is made for each."""
    names = weights.names()
    towers = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    counts = [(field, tower.get(field)) for field in LAYER_FIELDS for tower in towers]
    counts = [(field, one) for field, value in counts for one in _each(value)]
    for field, layers in counts:
        if isinstance(layers, int) and not 0 <= layers <= len(names):
            problem = f"{field} {shown(layers)}, with {len(names)} tensors"
            raise UnsupportedModel(
                f"{where}: config.json has impossible sizes ({problem}): {RESTORE}"
            )
    most = max([MOST_LABELS, *(max(weights.shape(name), default=0) for name in names)])
    for field in LABEL_FIELDS:
        labels = config.get(field)
        count = len(labels) if isinstance(labels, dict | list | str) else labels
        if isinstance(count, int | float) and not 0 <= count <= most:
            raise UnsupportedModel(
                f"{where}: config.json has {shown(count)} labels in '{field}',"
                f" which no tensor of the checkpoint has: {RESTORE}"
            )


def check_values(typed: Any, where: str) -> None:
    """Refuse a config with a value out of its range; the error names the field and the range."""
    for field, name, value in _items(typed):
        for rule in RULES:
            if value is not None and re.fullmatch(rule.fields, name) and not rule.allowed(value):
                raise UnsupportedModel(
                    f"{where}: config.json has {field} {shown(value)}, not {rule.expected}:"
                    f" {RESTORE}"
                )


def _items(config: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of every field that is read, also inside such as rope_parameters."""
    content = config if isinstance(config, dict) else _read_fields(config)
    for key, value in content.items():
        if key in LABEL_FIELDS:
            continue
        yield f"{prefix}{key}", str(key), value
        if isinstance(value, dict) or hasattr(value, "model_type"):
            yield from _items(value, f"{prefix}{key}.")


def _read_fields(config: Any) -> dict[str, Any]:
    """What classes may read of a config. Files of the hub have more, from who trained the model."""
    known = _declared(type(config)) | UNDECLARED
    return {key: value for key, value in vars(config).items() if key in known}


@cache
def _declared(kind: Any) -> frozenset[str]:
    """The settings of a class of configs, also under their other names."""
    return frozenset((*(field.name for field in fields(kind)), *kind.attribute_map))
