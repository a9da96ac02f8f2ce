"""Read a mergekit config (YAML). What cannot be done is named, never ignored."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from symmerge.checkpoints.limits import LARGEST_OPTIONS, read_plain
from symmerge.errors import MismatchError
from symmerge.merging.mergekit_methods import METHOD_RULES, MergekitMerge, MergekitSource
from symmerge.merging.mergekit_settings import NotSupported, Setting, parse_flag, parse_setting
from symmerge.models.model import load
from symmerge.models.precision import STORED_DTYPES
from symmerge.models.tables import layer_count

MARK = re.compile(r"^merge_method\s*:", re.MULTILINE)
DEEPEST = 12  # levels of a file
KEEPS_TOKENIZER = "the merge keeps the tokenizer and all rows of its base; leave it out"
KNOWN = ("merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype")
NOT_HERE = {
    "modules": "only whole models are merged; give models",
    "tokenizer_source": KEEPS_TOKENIZER,
    "tokenizer": KEEPS_TOKENIZER,
    "chat_template": "set it in the tokenizer of the merge afterwards",
}
Object = Mapping[str, Any]


def is_mergekit(file: str | os.PathLike[str]) -> bool:
    """Whether a file is a mergekit config: one with a merge_method at its top level."""
    try:
        return bool(MARK.search(read_plain(Path(file), LARGEST_OPTIONS).decode("utf-8")))
    except (OSError, ValueError):
        return False


def read_mergekit(file: str | os.PathLike[str]) -> MergekitMerge:
    """The merge that a mergekit config describes: `merge(read_mergekit("merge.yml"))`.

    linear, slerp, ties, dare_linear, dare_ties and task_arithmetic over whole models, with their
    parameters, also by layer or by name of a tensor. Paths are relative to where you are, as
    mergekit takes them. Models are aligned to base_model or the first when they are merged.
    """
    try:
        return _merge(str(file), _content(Path(file)))
    except NotSupported as error:
        raise MismatchError(f"{file}: {error}") from None


def _content(file: Path) -> Object:
    try:
        text = read_plain(file, LARGEST_OPTIONS).decode("utf-8")
        _check_events(file, text)
        content = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:160]
        raise MismatchError(
            f"{file} cannot be read as YAML ({reason}): give a config of mergekit"
        ) from error
    if not isinstance(content, dict) or "merge_method" not in content:
        raise MismatchError(f"{file} is not a mergekit config: it has no merge_method; add one")
    return content


def _check_events(file: Path, text: str) -> None:
    """Refuse aliases and deep nesting before anything is built of them: both can cost much."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
            raise MismatchError(
                f"{file} has an alias (*name) or lists {DEEPEST} deep: write it out"
            )


def _merge(file: str, content: Object) -> MergekitMerge:
    method = content["merge_method"]
    if not isinstance(method, str) or method not in METHOD_RULES:
        raise NotSupported(f"merge_method {method}", f"choose one of {', '.join(METHOD_RULES)}")
    for key in content:
        if key not in KNOWN:
            raise NotSupported(str(key), NOT_HERE.get(str(key), "symmerge does not know it"))
    base = content.get("base_model")
    base = None if base is None else _model(base, "base_model")
    sources, more = _sources(method, content)
    settings, flags = _parameters(method, _object(content, "parameters", ""), "")
    nearer, their_flags = _parameters(method, more, "slices[0].")
    settings = {
        name: Setting(
            tuple(rule for one in (nearer, settings) if name in one for rule in one[name].rules)
        )
        for name in {**settings, **nearer}
    }
    ordered = _base_first(method, sources, base)
    _check_values(method, ordered, settings)
    return MergekitMerge(
        file=file,
        method=method,
        sources=ordered,
        has_base=base is not None,
        settings=settings,
        flags={**METHOD_RULES[method].flags, **flags, **their_flags},
        dtype=_dtype(content, "out_dtype") or _dtype(content, "dtype"),
    )


def _base_first(
    method: str, sources: Sequence[MergekitSource], base: str | None
) -> tuple[MergekitSource, ...]:
    """The base and then the others; mergekit adds a base that is not among the models."""
    rules = METHOD_RULES[method]
    if base is None and (rules.from_base or method == "slerp"):
        raise NotSupported(f"{method} without base_model", "name the model it starts from")
    first = [source for source in sources if source.model == base]
    others = [source for source in sources if source.model != base]
    if base is not None and not first:
        first = [MergekitSource(base)]
    ordered = (*first, *others)
    places = [os.path.realpath(source.model) for source in ordered]
    if len({*places}) < len(places):
        raise NotSupported("a model that is there twice", "name every model once")
    if len(ordered) < 2:
        raise NotSupported("a merge of one model", "give two or more")
    if rules.max_models and len(ordered) > rules.max_models:
        raise NotSupported(f"{method} of {len(ordered)} models", f"it takes {rules.max_models}")
    return ordered


def _check_values(
    method: str, sources: Sequence[MergekitSource], settings: Mapping[str, Setting]
) -> None:
    """Refuse parameters that are nowhere, before any work."""
    rules = METHOD_RULES[method]
    if "t" in rules.shared and "t" not in settings:
        raise NotSupported(f"{method} without parameters.t", "say where between both models")
    for source in sources[1:] if rules.from_base else sources:
        if "weight" in rules.of_models and not {"weight"} & {*source.settings, *settings}:
            raise NotSupported(f"{method} of {source.model} without a weight", "give one")


def _sources(method: str, content: Object) -> tuple[list[MergekitSource], Object]:
    """The models with their parameters, and parameters of the slice that holds them."""
    if ("models" in content) == ("slices" in content):
        raise NotSupported("a config without models, or with models and slices", "give models")
    if "models" in content:
        return [*_entries(method, content["models"], "models", ("model", "parameters"))], {}
    slices = content["slices"]
    if not isinstance(slices, list) or len(slices) != 1 or not isinstance(slices[0], dict):
        raise NotSupported("slices", "only one slice of whole models is merged; give models")
    (only,) = slices
    for key in only:
        if key not in ("sources", "parameters"):
            raise NotSupported(f"slices[0].{key}", "a slice has sources and parameters here")
    keys = ("model", "layer_range", "parameters")
    sources = [*_entries(method, only.get("sources"), "slices[0].sources", keys)]
    return sources, _object(only, "parameters", "slices[0].")


def _entries(
    method: str, entries: object, where: str, keys: tuple[str, ...]
) -> Iterator[MergekitSource]:
    if not isinstance(entries, list) or not entries:
        raise NotSupported(where, "write a list of models")
    for number, entry in enumerate(entries):
        place = f"{where}[{number}]"
        if not isinstance(entry, dict) or "model" not in entry:
            raise NotSupported(place, "it has no model")
        for key in entry:
            if key not in keys:
                raise NotSupported(f"{place}.{key}", f"a model has {' and '.join(keys)}")
        model = _model(entry["model"], f"{place}.model")
        if "layer_range" in keys:
            _check_whole(model, entry.get("layer_range"), place)
        own, flags = _parameters(method, _object(entry, "parameters", f"{place}."), f"{place}.")
        if refused := [*flags, *(own.keys() - {*METHOD_RULES[method].of_models})]:
            raise NotSupported(
                f"{place}.parameters.{refused[0]}", "it is of the merge, not of a model; move it"
            )
        yield MergekitSource(model, own)


def _check_whole(model: str, layers: object, place: str) -> None:
    count = layer_count(load(model))
    if layers != [0, count]:
        why = f"only whole models are merged, and {model} has {count} layers: [0, {count}]"
        raise NotSupported(f"{place}.layer_range {layers}", why)


def _model(reference: object, where: str) -> str:
    """The folder or hub name of a model reference, in its short or its long form."""
    path = reference
    while isinstance(path, dict):  # {model: {path: ...}}
        inner = path.get("model", path.get("path"))
        if inner is None or len({key for key, value in path.items() if value is not None}) > 1:
            raise NotSupported(where, "give a folder or a hub name alone; no revision, no adapter")
        path = inner
    if not isinstance(path, str) or not path.isprintable() or not path:
        raise NotSupported(where, "write a folder or a hub name")
    if isinstance(reference, str) and (sign := next((s for s in "+@" if s in path), None)):
        what = "an adapter" if sign == "+" else "a revision"
        raise NotSupported(
            f"{where} {path}", f"{sign} asks for {what}; give a whole model's folder"
        )
    return path


def _parameters(
    method: str, content: Object, where: str
) -> tuple[dict[str, Setting], dict[str, bool]]:
    rules = METHOD_RULES[method]
    settings, flags = {}, {}
    for name, value in content.items():
        place = f"{where}parameters.{name}"
        if name in rules.flags:
            flags[name] = parse_flag(value, place)
        elif name in (*rules.of_models, *rules.shared):
            settings[name] = parse_setting(value, place)
        else:
            taken = ", ".join((*rules.of_models, *rules.shared, *rules.flags))
            raise NotSupported(place, f"{method} takes {taken}")
    return settings, flags


def _object(content: Object, key: str, where: str) -> Object:
    named = content.get(key) or {}
    if not isinstance(named, dict):
        raise NotSupported(f"{where}{key}", "write one parameter per line, 'weight: 0.5'")
    return {str(name): value for name, value in named.items()}


def _dtype(content: Object, key: str) -> str | None:
    name = content.get(key)
    if name is not None and name not in STORED_DTYPES:
        raise NotSupported(f"{key} {name}", f"weights are stored in {', '.join(STORED_DTYPES)}")
    return name
