"""Bind a config and tensor names to a family's table, as transformers would read them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from symmerge.checkpoints.files import RESTORE
from symmerge.checkpoints.safetensors_files import DTYPES
from symmerge.checkpoints.weights import Weights
from symmerge.errors import CheckpointError, UnsupportedModel, shown
from symmerge.families import Family
from symmerge.models.config_rules import check_values
from symmerge.symmetry.spec import Spec


def typed_config(config: Mapping[str, Any], where: str) -> Any:
    """The config as transformers' class for this model type."""
    from transformers import CONFIG_MAPPING  # slow to import, and only needed here

    try:
        with warnings.catch_warnings(action="ignore"):  # an error comes alone
            typed = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    except Exception as error:  # transformers validates configs with many kinds of exceptions
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModel(
            f"{where}: transformers refuses config.json ({reason}): {RESTORE}"
        ) from error
    check_values(typed, where)
    return typed


def bind(family: Family, config: Mapping[str, object], names: Collection[str], where: str) -> Spec:
    """The table for a config and the tensors of a checkpoint."""
    typed, declared = typed_config(config, where), config.get("architectures", [])
    if not _is_list_of_names(declared := [] if declared is None else declared):
        raise UnsupportedModel(
            f"{where}: 'architectures' in config.json is {shown(declared)}, not a list of names:"
            f" {RESTORE}"
        )
    if not declared:
        import transformers

        # Two families may have the same tensors: consider only classes that this config belongs to.
        known = {
            name: about
            for name, about in family.architectures.items()
            if getattr(transformers, name).config_class is type(typed)
        }
        family = replace(family, architectures=known)
    try:
        architecture = family.architecture(declared, names)
        typed.architectures = [architecture]  # readers may ask which head it is
        return family.bind(typed, names, architecture)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{where}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{where}: config.json has impossible sizes ({error!r}): {RESTORE}"
        ) from error


def _is_list_of_names(declared: object) -> TypeGuard[list[str]]:
    return isinstance(declared, list) and all(isinstance(name, str) for name in declared)


def current_names(family: Family, weights: Weights, where: str) -> dict[str, str]:
    """Current tensor name -> name in the file, without buffers."""
    names: dict[str, str] = {}
    for stored in weights.names():
        if family.is_buffer(stored):
            continue
        name = family.rename(stored)
        if name in names:
            raise CheckpointError(
                f"{where}: {stored} and {names[name]} are two names of the same tensor: remove one"
            )
        if weights.dtype(stored) not in DTYPES.values():
            raise CheckpointError(
                f"{where}: {stored} is stored as {weights.dtype(stored)}: quantised or not weights;"
                " use the float16 or float32 checkpoint"
            )
        names[name] = stored
    return names


def drop_unread(family: Family, spec: Spec, stored_as: Mapping[str, str]) -> dict[str, str]:
    """The stored tensors without those that no class reads under this config."""
    return {
        name: stored
        for name, stored in stored_as.items()
        if name in spec.tensors or not any(re.search(one, name) for one in family.unread)
    }


def drop_copies(family: Family, weights: Weights, stored_as: dict[str, str], where: str) -> None:
    """Forget stored tensors that are another one again, whatever the config says."""
    for alias, target in family.copies.items():
        if alias in stored_as:
            copy = stored_as.pop(alias)
            stored = stored_as.setdefault(target, copy)
            if not torch.equal(weights[stored], weights[copy]):
                raise CheckpointError(
                    f"{where}: {copy} differs from {stored}, of which it is a copy in every"
                    f" {family.name}: {RESTORE}"
                )


def written_out(family: Family, config: dict[str, Any], where: str) -> dict[str, Any]:
    """The config with settings that transformers would read off others, which may change."""
    if not family.explicit:
        return config
    typed = typed_config(config, where)
    return config | {name: getattr(typed, name) for name in family.explicit if hasattr(typed, name)}


def untangle_ties(
    family: Family, weights: Weights, stored_as: dict[str, str], config: dict[str, Any], where: str
) -> dict[str, Any]:
    """Treat stored copies of tied tensors as transformers does.

    Copies are dropped if all are equal; if one differs, the model is not tied.
    """
    if not family.ties or not typed_config(config, where).tie_word_embeddings:
        return config
    for alias, target in family.ties.items():
        if alias in stored_as and target not in stored_as:
            stored_as[target] = stored_as.pop(alias)
    copies = {alias: target for alias, target in family.ties.items() if alias in stored_as}
    if all(
        torch.equal(weights[stored_as[alias]], weights[stored_as[target]])
        for alias, target in copies.items()
    ):
        for alias in copies:
            del stored_as[alias]
        return config
    # The config unties all or none: a tensor that is still shared gets a copy.
    for alias, target in family.ties.items():
        if target in stored_as:
            stored_as.setdefault(alias, stored_as[target])
    return {**config, "tie_word_embeddings": False}
