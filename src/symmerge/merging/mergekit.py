"""Write a mergekit config for aligned checkpoints, equivalent to `combine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import final

import torch

from symmerge.checkpoints.weights import working
from symmerge.errors import MismatchError
from symmerge.merging.combining import method_for, normalised_weights
from symmerge.models.label_sets import check_same_labels
from symmerge.models.model import Model, load
from symmerge.models.tables import check_same_table

Folder = str | PathLike[str]


@final
@dataclass(frozen=True)
class MergekitMethod:
    """A mergekit method: its name, parameters per model, and parameters of the merge."""

    name: str
    model: tuple[str, ...] = ()
    merge: Mapping[str, str] = field(default_factory=dict)


# mergekit's defaults for `normalize` and `rescale` are not always ours, so both are explicit.
FORMS: dict[str, MergekitMethod] = {
    "mean": MergekitMethod("linear", ("weight",)),
    "slerp": MergekitMethod("slerp", (), {"t": "{t}"}),
    "ties": MergekitMethod("ties", ("weight", "density"), {"normalize": "true"}),
    "dare": MergekitMethod(
        "dare_linear", ("weight", "density"), {"normalize": "false", "rescale": "true"}
    ),
    "dare_ties": MergekitMethod(
        "dare_ties", ("weight", "density"), {"normalize": "true", "rescale": "true"}
    ),
}
OURS = {form.name: ours for ours, form in FORMS.items()}  # mergekit's name -> ours


def mergekit_config(
    folders: Sequence[Folder],
    weights: Sequence[float] | None = None,
    method: str = "linear",
    *,
    base: Folder | None = None,
    density: float = 0.5,
) -> str:
    """The YAML for `mergekit-yaml`, for stock checkpoints in one basin.

    `mergekit_config(["pair/reference", "pair/aligned"], [0.7, 0.3])`. Methods have mergekit's
    names: linear, slerp, ties, dare_linear, dare_ties. As in `combine`, the first folder is the
    default base; the tokenizer comes from the base. mergekit draws its own random numbers and
    rescales by the entries it kept, so DARE differs from ours entry by entry.
    """
    if method not in OURS:
        raise MismatchError(
            f"method {method}: those of mergekit that can be handed over are {', '.join(OURS)}"
        )
    models = [_stock(folder) for folder in folders]
    origin = _stock(base) if base is not None else None
    differs = method_for(OURS[method], models, origin, density).thin is not None
    check_same_table([*models, *([origin] if origin else [])])
    check_same_labels(models, "handed over to mergekit")
    if len({model.path for model in models}) < len(models):
        raise MismatchError(
            "a folder is given twice: mergekit identifies models by their folders;"
            " give it once, with the sum of the weights"
        )
    shares, start = normalised_weights(models, weights), origin or models[0]
    lines = [f"merge_method: {method}", f"base_model: {_reference(start)}", "models:"]
    for model, share in zip(models, shares, strict=True):
        lines.append(f"  - model: {_reference(model)}")
        # The base's difference from itself is zero and needs no weight.
        weighed = not (differs and model.path == start.path)
        lines += _model_parameters(FORMS[OURS[method]], share, density) if weighed else []
    # No tokenizer_source: mergekit would truncate the embeddings to the tokenizer's tokens.
    # Without it, mergekit copies the base's files.
    lines += _merge_parameters(FORMS[OURS[method]], shares[-1])
    return "\n".join([*lines, *_precision(models[0].dtype), ""])


def _model_parameters(form: MergekitMethod, share: float, density: float) -> list[str]:
    values = {"weight": _number(share), "density": _number(density)}
    lines = [f"      {name}: {values[name]}" for name in form.model]
    return ["    parameters:", *lines] if lines else []


def _merge_parameters(form: MergekitMethod, t: float) -> list[str]:
    lines = [f"  {name}: {text.format(t=_number(t))}" for name, text in form.merge.items()]
    return ["parameters:", *lines] if lines else []


def _stock(folder: Folder) -> Model:
    # mergekit takes a path that does not exist at run time for a hub name.
    model = load(Path(folder).resolve())
    if not model.stock:
        raise MismatchError(
            f"{model.where} has heads of twice the size, which mergekit does not know:"
            " hand over its parents"
        )
    return model


def _reference(model: Model) -> str:
    """A model reference; in long form if the path has + or @, which mergekit would split at."""
    quoted = f'"{"".join(map(_escaped, str(model.path)))}"'
    return f"{{model: {{path: {quoted}}}}}" if {"+", "@"} & set(quoted) else quoted


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() and letter not in '"\\' else f"\\U{ord(letter):08x}"


def _number(value: float) -> str:
    """A number without an exponent, which YAML would read as a string."""
    return f"{Decimal(repr(value)):f}"


def _precision(stored: torch.dtype) -> list[str]:
    """Compute as we do, store as the first model does."""
    name, computed = (str(dtype).removeprefix("torch.") for dtype in (stored, working(stored)))
    return [f"dtype: {computed}", *([f"out_dtype: {name}"] if name != computed else [])]
