"""Move a model along its symmetry orbit: to a random member, or by a saved alignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from symmerge.models.alignment import Alignment, apply, made_for, read_alignment
from symmerge.models.canonical.form import canonicalize
from symmerge.models.model import Model

# Rotations need folded gains; a random element would undo every other canonical step.
NEEDED = ("fold",)


def random_member(model: Model, seed: int = 0) -> tuple[Alignment, Model]:
    """A random element of the whole symmetry group, and the model transformed by it.

    >>> from symmerge import load, verify
    >>> from symmerge.lab.small_models import small_model
    >>> model = load(small_model("llama"))
    >>> verify(model, random_member(model, seed=1)[1]).same
    True
    """
    prepared = canonicalize(model, NEEDED)
    alignment = Alignment.random(prepared.spec, torch.Generator().manual_seed(seed))
    return alignment, apply(alignment, prepared)


def keep(
    alignment: Alignment,
    model: Model,
    path: Path,
    *,
    steps: tuple[str, ...] = NEEDED,
    restrict: Mapping[str, str] | None = None,
    reference: Model | None = None,
) -> None:
    """Save an alignment so that `follow` can repeat it on the same checkpoint.

    `reference` is the model that it brings the checkpoint to.
    """
    header = {**made_for(model), "canonical": list(steps), "restrict": dict(restrict or {})}
    if reference:
        header |= {"reference": reference.where, "reference_sha256": reference.digest()}
    replace(alignment, header=header).save(path)


def follow(path: str | Path, model: Model, *, device: str = "cpu") -> Model:
    """Apply a saved alignment to the checkpoint it was made for, prepared in the same way."""
    header, _ = read_alignment(path)
    prepared = canonicalize(
        model.restrict(**header.get("restrict", {})), tuple(header.get("canonical", NEEDED))
    )
    return apply(Alignment.load(path, prepared.spec), prepared, device=device)
