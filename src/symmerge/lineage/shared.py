"""What two models have in common, as two models of one table: layers, tensors, visible rows.

Weights are compared, nothing is run, so that a classifier can be compared with the language model
it came from, and a vocabulary with one that has more tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights, Weights
from symmerge.errors import MismatchError
from symmerge.models.model import Model
from symmerge.symmetry.spec import Space, Spec, layer_of, listing

_NUMBER = re.compile(r"\.\d+\.")
LISTED = 3  # differences in one line


def layers_of(spec: Spec) -> tuple[int, ...]:
    """The numbers of the layers, from those in the names of tensors."""
    return tuple(sorted({at for name in spec.tensors if (at := layer_of(name)) is not None}))


def overlap(a: Model, b: Model, layers: Mapping[int, int]) -> tuple[Model, Model]:
    """Both models cut down to what they share; `layers` has a layer of A for each of B.

    Visible spaces keep their first rows: tokens are taken to have the same numbers in both.
    """
    names = {name: _renumbered(name, layers) for name in b.spec.tensors}
    names = {ours: theirs for ours, theirs in names.items() if theirs in a.spec.tensors}
    names = {
        ours: theirs
        for ours, theirs in names.items()
        if len(a.spec.shapes[theirs]) == len(b.spec.shapes[ours])
    }
    spec = _common(a, b, names, layers)
    return _cut(a, spec, names), _cut(b, spec, {name: name for name in names})


def _renumbered(name: str, layers: Mapping[int, int]) -> str:
    layer = layer_of(name)
    return name if layer is None else _NUMBER.sub(f".{layers[layer]}.", name, count=1)


def _common(a: Model, b: Model, names: Mapping[str, str], layers: Mapping[int, int]) -> Spec:
    """B's table cut to the shared tensors, with the smaller of every two visible spaces."""
    tensors = {name: b.spec.tensors[name] for name in names}
    met = {atom.space for name in names for piece in b.spec.pieces[name] for atom in piece.atoms}
    spaces: dict[str, Space] = {}
    differing: list[str] = []
    for name in [name for name in b.spec.spaces if name in met]:
        mine = b.spec.spaces[name]
        number = re.search(r"\.(\d+)$", name)
        twin = f"{name[: number.start()]}.{layers[int(number[1])]}" if number else name
        theirs = a.spec.spaces.get(twin)
        if theirs is not None and name not in b.spec.hidden and twin not in a.spec.hidden:
            mine = min(mine, theirs, key=lambda space: space.group.size)
        elif theirs is None or theirs.group != mine.group:
            differing.append(f"{name} {_group(theirs)} / {_group(mine)}")
        spaces[name] = mine
    if differing or not tensors:
        _refuse(a, b, tensors, differing)
    return replace(
        b.spec, spaces=spaces, tensors=tensors, norms=(), ties={}, joined=(), scales=(), summed=()
    )


def _group(space: Space | None) -> str:
    return f"{space.group.name}({space.group.size})" if space else "none"


def _refuse(a: Model, b: Model, tensors: Mapping[str, object], differing: Sequence[str]) -> None:
    kinds = f"{a.where} ({a.spec.architecture}) and {b.where} ({b.spec.architecture})"
    if not tensors:
        raise MismatchError(
            f"{kinds}: no part can be compared, because no tensor of one has a counterpart in the"
            " other; give models of one family"
        )
    bad = {one.split(" ")[0] for one in differing}
    parts = sorted(
        {
            name
            for name in tensors
            if not bad & {atom.space for piece in b.spec.pieces[name] for atom in piece.atoms}
        }
    )
    more = f" and {len(differing) - LISTED} more" if len(differing) > LISTED else ""
    raise MismatchError(
        f"{kinds} differ in: {'; '.join(differing[:LISTED])}{more}; "
        + (f"only {listing(parts)}" if parts else "nothing")
        + " could be compared, which says nothing of kinship: give models of one family and width,"
        " or whose width can be changed"
    )


def _cut(model: Model, spec: Spec, names: Mapping[str, str]) -> Model:
    """The model with the tensors `names` (name in the table -> own name), cut to its shapes."""
    weights = DerivedWeights(
        MemoryWeights({}),
        {
            name: partial(_first, model.weights, own, spec.shapes[name])
            for name, own in names.items()
        },
        added={name: (spec.shapes[name], model.weights.dtype(own)) for name, own in names.items()},
    )
    step = HistoryStep("overlap", "cut to what both models have")
    return model.derive(weights, step=step, spec=spec)


def _first(weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = weights[name]
    return tensor[tuple(slice(0, size) for size in shape)]
