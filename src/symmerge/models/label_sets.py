"""Classifiers of different labels, side by side: each is written with the labels of all.

A model gives a label it does not know the probability zero, so no function changes. Where models
are mixed, such a label's row of a head is that of the models that know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights, Weights
from symmerge.errors import MismatchError
from symmerge.models.config_rules import LABEL_FIELDS
from symmerge.models.model import Model
from symmerge.models.settings import class_labels, few_labels, invented, problem_type
from symmerge.models.tables import check_same_kind
from symmerge.symmetry.groups import Trivial

LABEL = "label"  # the space of a head's rows
UNKNOWN = -100.0  # bias of a label that a model does not know: e^-100 is zero in float32
Known = Bool[Tensor, " labels"]
Rows = Mapping[str, int]
"""The tensors of a head, and their axis of labels."""


def side_by_side(models: Sequence[Model], verb: str = "aligned or merged") -> list[Model]:
    """The models with one set of labels: the first one's, then those that the others add. Lazy.

    Models that have the same labels already are returned as they are.
    """
    models, names = list(models), [class_labels(model) for model in models]
    if all(_same(names[0], theirs) for theirs in names[1:]):
        return models
    _refuse_unlike(models, names, verb)
    union = list(dict.fromkeys(label for theirs in names for label in theirs))
    return [_with_labels(model, mine, union) for model, mine in zip(models, names, strict=True)]


def _same(mine: Sequence[str], theirs: Sequence[str]) -> bool:
    """Names that transformers invented may stand for any others."""
    one_invented = invented(mine) or invented(theirs)
    return len(mine) == len(theirs) and (list(mine) == list(theirs) or one_invented)


def _refuse_unlike(models: Sequence[Model], names: Sequence[Sequence[str]], verb: str) -> None:
    first, mine = models[0], names[0]
    check_same_kind(models, verb)
    for model, theirs in zip(models, names, strict=True):
        kinds = problem_type(first), problem_type(model)
        unlike = f"{first.where} and {model.where} cannot be {verb}:"
        if kinds[0] != kinds[1] or "regression" in kinds:
            raise MismatchError(
                f"{unlike} their tasks differ ({kinds[0]} of {few_labels(mine)}, {kinds[1]} of"
                f" {few_labels(theirs)}), and no head can do both; give classifiers of one kind"
            )
        if invented(theirs) or len(set(theirs)) < len(theirs):
            raise MismatchError(
                f"{model.where} has {few_labels(theirs)}, whose meaning is not given: name them"
                " in id2label of its config.json, each once, to keep the heads side by side"
            )
        if not _heads_with_biases(model):
            raise MismatchError(
                f"{unlike} one has {few_labels(mine)}, the other {few_labels(theirs)}, and a head"
                " without a bias cannot leave a label out; train both on the same labels"
            )


def _heads_with_biases(model: Model) -> bool:
    sizes = [len(model.spec.tensors[name]) for name in head_rows(model)]
    return sizes.count(1) == sizes.count(2) == len(sizes) / 2 > 0


def head_rows(model: Model) -> dict[str, int]:
    """The tensors of a classifier's heads, and their axis of labels."""
    spec = model.spec
    if LABEL not in spec.spaces or not spec.task.endswith("-classification"):
        return {}
    return {
        met.piece.tensor: spec.axis_of(met.piece.tensor, LABEL, met.role)
        for met in spec.occurrences(LABEL)
    }


def _with_labels(model: Model, mine: Sequence[str], union: Sequence[str]) -> Model:
    """The same classifier with rows for all labels, in this order."""
    places = torch.tensor([mine.index(label) if label in mine else -1 for label in union])
    space = replace(model.spec.spaces[LABEL], group=Trivial(len(union)))
    spec = replace(model.spec, spaces={**model.spec.spaces, LABEL: space})
    rows = {
        name: partial(_placed, model.weights, name, axis, places)
        for name, axis in head_rows(model).items()
    }
    kept = {name: partial(model.weights.__getitem__, name) for name in model.weights}
    added = {name: (spec.shapes[name], model.weights.dtype(name)) for name in model.weights}
    what = f"its head has rows for {few_labels(union)}"
    if unknown := int((places < 0).sum()):
        what += f", of which it knows {len(mine)}: the other {unknown} have the probability zero"
    return model.derive(
        DerivedWeights(MemoryWeights({}), {**kept, **rows}, added=added),
        step=HistoryStep("labels", what, details={"labels": list(union), "known": list(mine)}),
        config=_config(model.config, union),
        spec=spec,
    )


def _placed(weights: Weights, name: str, axis: int, places: Tensor) -> Tensor:
    tensor = weights[name]
    rows = tensor.index_select(axis, places.clamp_min(0))
    fresh = torch.full_like(rows, UNKNOWN if rows.ndim == 1 else 0.0)
    return torch.where(_along(places >= 0, axis, rows), rows, fresh)


def _along(labels: Tensor, axis: int, tensor: Tensor) -> Tensor:
    """A value for each label, along this axis of a tensor."""
    return labels.to(tensor.device).reshape([-1 if at == axis else 1 for at in range(tensor.ndim)])


def _config(config: Mapping[str, Any], union: Sequence[str]) -> dict[str, Any]:
    named = {
        "id2label": {str(number): label for number, label in enumerate(union)},
        "label2id": {label: number for number, label in enumerate(union)},
    }
    counts = {key: len(union) for key in LABEL_FIELDS if key in config and key not in named}
    return {**config, **named, **counts}


# Mixing.


def known_labels(model: Model) -> Known | None:
    """Which labels a classifier knows; None if it has no head with biases."""
    biases = [name for name, axis in head_rows(model).items() if len(model.spec.tensors[name]) == 1]
    if not biases:
        return None
    return torch.stack([model.weights[name] != UNKNOWN for name in biases]).any(0)


def with_all_labels(models: Sequence[Model]) -> list[Model]:
    """Models in one basin for mixing: rows that one does not know are those of the others. Lazy.

    Several that know a row give its mean. What comes out is for mixing alone: on labels it does
    not know, such a model is no longer what it was.
    """
    known = _partly_known(models)
    if known is None:
        return list(models)
    filled = (
        _with_rows(model, partial(_filled, models, known, at)) for at, model in enumerate(models)
    )
    return [
        replace(model, history=(*model.history, HistoryStep("heads", _about(own))))
        for model, own in zip(filled, known, strict=True)
    ]


def _about(known: Known) -> str:
    unknown = int((~known).sum())
    return f"rows of its head for the {unknown} labels that it does not know are the others'"


def check_same_labels(models: Sequence[Model], verb: str) -> None:
    """Refuse models that do not all know the same labels, where nothing keeps rows apart."""
    if _partly_known(models) is not None:
        raise MismatchError(
            f"{models[0].where} and {models[1].where} have different labels and cannot be {verb},"
            " which would average rows of one with nothing: merge them here"
        )


def with_scaled_labels(models: Sequence[Model]) -> list[Model]:
    """Models whose equal mean has the rows of `with_all_labels`, whatever moves each of them.

    A row is as much larger as there are models that do not know it, and zero where unknown. Lazy.
    """
    known = _partly_known(models)
    if known is None:
        return list(models)
    factor = len(models) * known / known.sum(0).clamp_min(1)
    return [
        _with_rows(model, partial(_scaled, model, factor[at])) for at, model in enumerate(models)
    ]


def _partly_known(models: Sequence[Model]) -> Tensor | None:
    """Which model knows which label, [models, labels]; None if all know the same."""
    if len({model.spec.sizes.get(LABEL) for model in models}) > 1:
        return None  # tables differ, which is refused elsewhere
    each = [known_labels(model) for model in models]
    known = [one for one in each if one is not None]
    if len(known) < len(each) or all(bool(one.all()) for one in known):
        return None
    together = torch.stack(known)
    return None if bool((together == together[0]).all()) else together


def _with_rows(model: Model, row: Callable[[str, int], Tensor]) -> Model:
    """The model with other heads: `row` makes a tensor, by its name and its axis of labels."""
    rows = {name: partial(row, name, axis) for name, axis in head_rows(model).items()}
    return replace(model, weights=DerivedWeights(model.weights, rows), moved=None)


def _filled(models: Sequence[Model], known: Tensor, at: int, name: str, axis: int) -> Tensor:
    own = models[at].weights[name]
    parts = [
        torch.where(_along(theirs, axis, own), model.weights[name].to(own), 0)
        for model, theirs in zip(models, known, strict=True)
    ]
    mean = torch.stack(parts).sum(0) / _along(known.sum(0).clamp_min(1), axis, own)
    return torch.where(_along(known[at] | ~known.any(0), axis, own), own, mean)


def _scaled(model: Model, factor: Tensor, name: str, axis: int) -> Tensor:
    own = model.weights[name]
    return torch.where(_along(factor > 0, axis, own), own * _along(factor, axis, own), 0)
