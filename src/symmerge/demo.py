"""The demonstration: every family, moved by a random element of its whole symmetry group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from symmerge.inspection import spaces
from symmerge.model import Model, load
from symmerge.orbit import random_member
from symmerge.verify import verify
from symmerge.zoo.small import SMALL, small_model


def rows(seed: int = 0) -> Iterator[dict[str, Any]]:
    """For each small model: how far its weights moved, and how far its logits did."""
    for name in SMALL:
        model = load(small_model(name, seed=seed))
        _, moved = random_member(model, seed)
        verdict = verify(model, moved)
        yield {
            "model": name,
            "class": model.spec.architecture,
            "spaces": len(moved.spec.hidden),
            "freedom": sum(row["degrees of freedom"] for row in spaces(moved.spec)),
            "weight change": weight_change(model, moved),
            "logit change": verdict.difference,
            "same function": "yes" if verdict.same else "NO",
        }


def weight_change(a: Model, b: Model) -> float:
    """|weights A - weights B| / |weights A|, over the tensors both have."""
    shared = [name for name in a.weights if name in b.weights]
    apart = sum((a.weights[name] - b.weights[name]).square().sum().item() for name in shared)
    return (apart / sum(a.weights[name].square().sum().item() for name in shared)) ** 0.5
