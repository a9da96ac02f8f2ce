"""Settings of a config that change what a model computes, with the defaults it leaves out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from symmerge.models.binding import typed_config
from symmerge.models.config_rules import SHARED
from symmerge.models.model import Model

WIDTHS = {
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "n_inner",
    "dim",
    "hidden_dim",
    "ffn_dim",
    "word_embed_proj_dim",
    "n_heads",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "pooler_output_size",
    "d_model",
    "ffn_hidden_size",
    "embedding_size",
    "mlp_ratio",
    "moe_intermediate_size",
    "d_ff",
    "d_kv",
    "num_heads",
}
"""Sizes of hidden spaces, which the table has as well."""
NO_MATTER = re.compile(
    "^_|^(output|summary|pooler|classifier|initializer|pretraining|task_specific)_|drop|dtype"
    "|label|token_id|architectures|return_dict|problem_type"
    "|chunk_size|init_std|encoder_stride|tie_word|use_cache|version|deterministic|sparse_pred|layerscale"
    "|pos_embed_(shift|jitter|rescale)|stage_names|out_(features|indices)|apply_layernorm|reshape"
)
"""Other keys that may differ: training, loading and what a backbone returns. Ties are undone."""


def behaviour(model: Model) -> Mapping[str, object]:
    """All settings but widths that the function depends on."""
    typed = typed_config(model.config, model.where)
    known = (_names(type(typed)) | SHARED) - WIDTHS
    if _turns_alike_at_any_length(typed):
        known -= {"max_position_embeddings"}
    return {
        key: _plain(value)
        for key, value in typed.to_dict().items()
        if key in known and (key in SHARED or not NO_MATTER.search(key))
    } | {
        "labels": model.spec.sizes.get("label"),
        "end_token": model.spec.end_token,
        "problem_type": problem_type(model),
        "pooler_act": _pooler_act(typed) if "pooled" in model.spec.sizes else None,
        **(_summary(typed) if "choice" in model.spec.sizes else {}),
    }


def _summary(typed: Any) -> dict[str, object]:
    """What a score for a whole text is read off, and through which activation."""
    return {name: getattr(typed, name) for name in ("summary_type", "summary_activation")}


def _pooler_act(typed: Any) -> str | None:
    return getattr(typed, "pooler_act", getattr(typed, "pooler_hidden_act", None))


def setting(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A setting of a config, or of the first of its towers that has it."""
    towers = (part for part in config.values() if isinstance(part, Mapping))
    known = (part[name] for part in (config, *towers) if part.get(name) is not None)
    return next(known, default)


@cache
def _names(kind: type) -> frozenset[str]:
    """The settings that a class of configs has."""
    return frozenset(kind().to_dict())


def _plain(value: object) -> object:
    """A value; of a config inside the config only what it sets itself."""
    if isinstance(value, dict) and "model_type" in value:
        return {key: one for key, one in value.items() if not NO_MATTER.search(str(key))}
    return value


def _turns_alike_at_any_length(typed: Any) -> bool:
    """Whether no rotary frequency depends on the longest input that the config names."""
    rope = getattr(typed, "rope_parameters", None)
    if not isinstance(rope, dict):
        return False
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    named = [kind["rope_type"] for kind in kinds if "rope_type" in kind]
    return bool(named) and all(kind in ("default", "linear") for kind in named)


def problem_type(model: Model) -> str | None:
    """How class scores are read: by a softmax, each by itself, or as a number."""
    if not model.spec.task.endswith("-classification"):
        return None
    usual = "regression" if model.spec.sizes.get("label") == 1 else "single_label_classification"
    return typed_config(model.config, model.where).problem_type or usual


def differing_settings(first: Model, second: Model, ignored: Collection[str] = ()) -> list[str]:
    """Settings that differ: "sliding_window 8 / None"."""
    mine, theirs = dict(behaviour(first)), dict(behaviour(second))
    differing = [
        f"{key} {mine.get(key)} / {theirs.get(key)}"
        for key in mine | theirs
        if key not in ignored and mine.get(key) != theirs.get(key)
    ]
    return differing + (_order_of_labels(first, second) if "id2label" not in ignored else [])


def _order_of_labels(first: Model, second: Model) -> list[str]:
    """The first label that another class has in the second model; labels may have other names."""
    mine, theirs = (class_labels(model) for model in (first, second))
    if sorted(mine) != sorted(theirs):
        return []
    pairs = enumerate(zip(mine, theirs, strict=True))
    return [f"id2label of class {at}: {x} / {y}" for at, (x, y) in pairs if x != y][:1]


def invented(labels: Sequence[str]) -> bool:
    """Whether transformers made up the names."""
    return all(label == f"LABEL_{at}" for at, label in enumerate(labels))


def few_labels(labels: Sequence[str]) -> str:
    """How many labels, and the first of them."""
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return f"{len(labels)} labels ({', '.join(labels[:3])}{more})"


def class_labels(model: Model) -> list[str]:
    """The names of a classifier's labels, by number."""
    if not model.spec.task.endswith("-classification"):
        return []
    named = typed_config(model.config, model.where).id2label or {}
    return [str(named[key]) for key in sorted(named)]
