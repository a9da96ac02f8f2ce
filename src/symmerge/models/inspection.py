"""A model's symmetries as rows of a table: spaces and tensors, layers folded together."""

from __future__ import annotations

import re
from typing import Any

from symmerge.models.model import Model
from symmerge.symmetry.groups import Group
from symmerge.symmetry.notation import unparse
from symmerge.symmetry.spec import Spec

_LAYER = re.compile(r"\.\d+(?=[.\s)*~]|$)")


def _template(name: str) -> str:
    return _LAYER.sub(".{i}", name)


def spaces(spec: Spec) -> list[dict[str, Any]]:
    """One row per kind of space: its group, its size, how often it occurs, its freedom."""
    rows: dict[str, dict[str, Any]] = {}
    for name, space in spec.spaces.items():
        copies = spec.batch(name)[0] if space.per else 1
        row = rows.setdefault(_template(name), _space_row(_template(name), space.group, space.per))
        row["elements"] += copies
        row["degrees of freedom"] += copies * space.group.dimension
        row["discrete (log10)"] += copies * space.group.log10_order
    return list(rows.values())


def _space_row(name: str, group: Group, per: str | None) -> dict[str, object]:
    per = _template(per) if per else ""
    return {
        "space": name,
        "group": group.name,
        "size": group.size,
        "per": per,
        "elements": 0,
        "degrees of freedom": 0,
        "discrete (log10)": 0.0,
    }


def tensors(model: Model) -> list[dict[str, Any]]:
    """One row per kind of tensor: its shape, and the spaces its axes live in."""
    rows: dict[str, dict[str, Any]] = {}
    for name, axes in model.spec.tensors.items():
        shape = "x".join(str(n) for n in model.weights.shape(name))
        row = {
            "tensor": _template(name),
            "count": 0,
            "shape": shape,
            "axes": _LAYER.sub(".{i}", unparse(axes)),
            "dtype": _short(model, name),
        }
        rows.setdefault(_template(name), row)["count"] += 1
    return list(rows.values())


def _short(model: Model, name: str) -> str:
    return str(model.weights.dtype(name)).removeprefix("torch.")


def summary(model: Model) -> dict[str, Any]:
    """Everything about a model's symmetries, for programs."""
    rows = spaces(model.spec)
    return {
        "model": model.where,
        "family": model.spec.family,
        "architecture": model.spec.architecture,
        "task": model.spec.task,
        "parameters": model.parameters,
        "bytes": model.bytes,
        "degrees of freedom": sum(row["degrees of freedom"] for row in rows),
        "discrete (log10)": sum(row["discrete (log10)"] for row in rows),
        "tied": dict(model.spec.ties),
        "spaces": rows,
        "tensors": tensors(model),
    }
