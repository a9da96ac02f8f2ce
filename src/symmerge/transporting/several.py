"""Fine-tunes of different bases, carried to one model and combined there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from symmerge.aligning.choices import check_choice
from symmerge.aligning.inputs import ModelLike, open_model
from symmerge.errors import MismatchError
from symmerge.merging.combining import METHODS, combine
from symmerge.models.model import Model
from symmerge.transporting.job import transport


def transport_all(
    fine_tunes: Sequence[tuple[ModelLike, ModelLike]],
    other: ModelLike,
    *,
    method: str = "ties",
    weights: Sequence[float] | None = None,
    density: float = 0.5,
    **options: Any,
) -> Model:
    """Task arithmetic across bases: `transport_all([(a, a_news), (c, c_code)], b)`.

    Every (BASE, TUNED) is carried to `other`, then they are combined there by a method of
    `combine`, with `other` as the base. `options` are those of `transport`.
    """
    check_choice("method", method, METHODS)
    pairs = [] if isinstance(fine_tunes, str) else [tuple(each) for each in fine_tunes]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise MismatchError("fine_tunes: give pairs of a base and its fine-tune")
    if weights is not None and len(weights) != len(pairs):
        raise MismatchError(
            f"{len(pairs)} fine-tunes but {len(weights)} weights: give one for each"
        )
    target, seed = open_model(other), options.get("seed", 0)
    options = {"verdict": False, **options}
    models = [transport(base, tuned, target, **options).model for base, tuned in pairs]
    if len(models) == 1:
        return models[0]
    thin = method in METHODS and METHODS[method].thin is not None
    how: dict[str, Any] = {"base": target, "density": density, "seed": seed} if thin else {}
    return combine(models, method, weights, **how)
