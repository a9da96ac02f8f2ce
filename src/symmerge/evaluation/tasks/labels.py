"""Convert the labels of data to class indices or regression targets of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from symmerge.errors import DataError, MismatchError
from symmerge.models.model import Model
from symmerge.symmetry.spec import listing


def class_indices(labels: Sequence[object], model: Model, data: str) -> list[int]:
    """Class index of each label; names are looked up in the model's config, else sorted."""
    classes = model.spec.sizes["label"]
    numbers = _numbers(labels)
    if numbers is None:
        numbers = _by_name([str(label) for label in labels], model, data)
    outside = sorted({number for number in numbers if number not in range(classes)})
    if outside:
        shown = ", ".join(f"{number:g}" for number in outside[:5])
        raise MismatchError(
            f"{data} has the label {shown}; {model.where} has {classes} classes,"
            f" 0 to {classes - 1}: remove those rows or map their labels"
        )
    return [int(number) for number in numbers]


def regression_targets(labels: Sequence[object], data: str) -> list[float]:
    """Labels as finite numbers."""
    numbers = _numbers(labels)
    if numbers is None or not all(map(math.isfinite, numbers)):
        raise DataError(
            f"{data} has labels that are not numbers, but the model predicts a number: give numbers"
        )
    return numbers


def _numbers(labels: Sequence[Any]) -> list[float] | None:
    try:
        return [float(label) for label in labels]
    except (TypeError, ValueError):
        return None


def _by_name(labels: Sequence[str], model: Model, data: str) -> list[float]:
    names, classes = sorted(set(labels)), model.spec.sizes["label"]
    known = _class_names(model)
    # LABEL_0, LABEL_1, ...: transformers' placeholders for unnamed classes
    if not known or all(name.startswith("LABEL_") for name in known):
        known = {name: float(number) for number, name in enumerate(names)}
        known = known if len(names) == classes else {}
    unknown = [name for name in names if name not in known]
    if unknown:
        available = listing(known) or f"{classes} classes without names"
        shown = listing(name[:40] for name in unknown)
        raise MismatchError(
            f"{data} has the label {shown}; {model.where} has {available}:"
            " rename them, or use numbers"
        )
    return [known[label] for label in labels]


def _class_names(model: Model) -> dict[str, float]:
    """Names of the model's classes, if its config has any."""
    names = model.config.get("label2id") or {}
    if not isinstance(names, dict) or not all(type(index) is int for index in names.values()):
        raise MismatchError(
            f"label2id in the config of {model.where} does not map names to numbers: correct it"
        )
    return {str(name): float(index) for name, index in names.items()}
