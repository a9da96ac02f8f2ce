"""Settings of a config that change what a model computes, with the defaults it leaves out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from symmerge.models.binding import typed_config
from symmerge.models.model import Model

WIDTHS = {
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "n_inner",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "pooler_output_size",
}
"""Sizes of hidden spaces, which the table has as well."""
NO_MATTER = re.compile(
    "^_|^(output|summary|pooler|classifier|initializer|pretraining|task_specific)_|drop|dtype"
    "|label|token_id|architectures|return_dict|problem_type"
    "|chunk_size|encoder_stride|tie_word|use_cache|version"
)
"""Other keys that may differ: training and loading. Ties are undone, the table has the labels."""
SHARED = {"sliding_window", "layer_types", "attention_chunk_size"}
"""Keys that code shared by many classes reads, although their own config has none."""


def behaviour(model: Model) -> Mapping[str, object]:
    """All settings but widths that the function depends on."""
    typed = typed_config(model.config, model.where)
    known = (type(typed)().to_dict().keys() | SHARED) - WIDTHS
    return {
        key: value
        for key, value in typed.to_dict().items()
        if key in known and (key in SHARED or not NO_MATTER.search(key))
    } | {"labels": model.spec.sizes.get("label")}


def differing_settings(first: Model, second: Model, ignored: Collection[str] = ()) -> list[str]:
    """Settings that differ: "sliding_window 8 / None"."""
    mine, theirs = dict(behaviour(first)), dict(behaviour(second))
    return [
        f"{key} {mine.get(key)} / {theirs.get(key)}"
        for key in mine | theirs
        if key not in ignored and mine.get(key) != theirs.get(key)
    ]
