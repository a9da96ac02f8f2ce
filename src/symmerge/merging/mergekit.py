"""Hand aligned checkpoints over to mergekit: a recipe for `mergekit-yaml` that gives what `combine` gives."""

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
from symmerge.merging.combining import method_for, normalised
from symmerge.models.model import Model, load
from symmerge.models.tables import check_same_table

Folder = str | PathLike[str]


@final
@dataclass(frozen=True)
class Form:
    """What mergekit calls one of our methods, which parameters every model has, and which the whole."""

    name: str
    each: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)


# mergekit's defaults for `normalize` and `rescale` are not ours everywhere, so they are said.
FORMS: dict[str, Form] = {
    "mean": Form("linear", ("weight",)),
    "slerp": Form("slerp", (), {"t": "{t}"}),
    "ties": Form("ties", ("weight", "density"), {"normalize": "true"}),
    "dare": Form("dare_linear", ("weight", "density"), {"normalize": "false", "rescale": "true"}),
    "dare_ties": Form("dare_ties", ("weight", "density"), {"normalize": "true", "rescale": "true"}),
}
OURS = {form.name: ours for ours, form in FORMS.items()}  # mergekit's name -> ours


def recipe(
    folders: Sequence[Folder],
    weights: Sequence[float] | None = None,
    method: str = "linear",
    *,
    base: Folder | None = None,
    density: float = 0.5,
) -> str:
    """The YAML that `mergekit-yaml` takes, for stock checkpoints in one basin: `recipe(["pair/reference", "pair/aligned"], [0.7, 0.3])`.

    Methods have mergekit's names: linear, slerp, ties, dare_linear, dare_ties. As in `combine`, the first folder is the base unless another is given;
    the tokenizer comes from there. mergekit draws its own chances and rescales by what they hit: dare differs from ours entry by entry.
    """
    if method not in OURS:
        raise MismatchError(
            f"method {method}: mergekit's that can be handed over are {', '.join(OURS)}"
        )
    form = FORMS[OURS[method]]
    models = [_stock(folder) for folder in folders]
    origin = _stock(base) if base is not None else None
    differs = method_for(OURS[method], models, origin, density).thin is not None
    check_same_table([*models, *([origin] if origin else [])])
    if len({model.path for model in models}) < len(models):
        raise MismatchError(
            "a folder is there twice: mergekit tells models apart by their folders; give it once, with the sum of the weights"
        )
    shares, start = normalised(models, weights), origin or models[0]
    lines = [f"merge_method: {method}", f"base_model: {_reference(start)}", "models:"]
    for model, share in zip(models, shares, strict=True):
        values = {"weight": _number(share), "density": _number(density)}
        lines.append(f"  - model: {_reference(model)}")
        if form.each and not (
            differs and model.path == start.path
        ):  # the base has no difference from itself to weigh
            lines += ["    parameters:", *(f"      {name}: {values[name]}" for name in form.each)]
    if form.whole:
        lines += [
            "parameters:",
            *(
                f"  {name}: {text.format(t=_number(shares[-1]))}"
                for name, text in form.whole.items()
            ),
        ]
    # No tokenizer_source: mergekit would cut the embeddings down to the tokens that the tokenizer names. Without one it copies the base's files.
    return "\n".join([*lines, *_precision(models[0].dtype), ""])


def _stock(folder: Folder) -> Model:
    model = load(
        Path(folder).resolve()
    )  # a path that is not there when mergekit runs would be looked for on the hub
    if not model.stock:
        raise MismatchError(
            f"{model.where} has heads of twice the size, which mergekit does not know: hand over its parents"
        )
    return model


def _reference(model: Model) -> str:
    """mergekit splits plain paths at + (an adapter) and @ (a revision); in the long form it does not."""
    quoted = f'"{"".join(map(_escaped, str(model.path)))}"'
    return f"{{model: {{path: {quoted}}}}}" if {"+", "@"} & set(quoted) else quoted


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() and letter not in '"\\' else f"\\U{ord(letter):08x}"


def _number(value: float) -> str:
    """Without an exponent, which YAML takes for a word."""
    return f"{Decimal(repr(value)):f}"


def _precision(stored: torch.dtype) -> list[str]:
    """Compute as we do, store as the first model does."""
    name, computed = (str(dtype).removeprefix("torch.") for dtype in (stored, working(stored)))
    return [f"dtype: {computed}", *([f"out_dtype: {name}"] if name != computed else [])]
