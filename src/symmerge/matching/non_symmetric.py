"""Two published matching methods that are not symmetries, for comparison only.

Their tables permit transformations that change the function. The gate refuses to write the
result as an aligned checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from symmerge.errors import MismatchError
from symmerge.models.model import Model
from symmerge.symmetry.groups import Permutation, RotaryPairs, Signs
from symmerge.symmetry.notation import Atom, Axes, Product, Sum, atoms
from symmerge.symmetry.spec import Space, Spec, layer_of


def ignore_heads(model: Model) -> Model:
    """Let every coordinate of an attention layer move anywhere, even out of its head."""
    spec = model.spec
    flat = _flat_spaces(model)
    spaces = {
        name: space
        for name, space in spec.spaces.items()
        if space.per not in flat and name not in flat
    }
    spaces |= {space.name: space for space in flat.values()}
    tensors = {
        name: tuple(_flatten(axis, flat, model.where) for axis in axes)
        for name, axes in spec.tensors.items()
    }
    return replace(model, spec=replace(spec, spaces=spaces, tensors=tensors))


def _flat_spaces(model: Model) -> dict[str, Space]:
    """One permutation space for each attention layer, under the name of its heads."""
    spec = model.spec
    values = {
        space.per: space
        for space in spec.spaces.values()
        if space.per and space.translation == "passes"
    }
    rotary = any(isinstance(space.group, RotaryPairs | Signs) for space in spec.spaces.values())
    grouped = any(spec.sizes.get(f"query{heads[4:]}", 1) > 1 for heads in values)
    if rotary or grouped:
        raise MismatchError(
            f"{model.where}: heads can only be ignored where queries, keys and values are alike"
            " (no rotary positions, no grouped heads)"
        )
    return {
        heads: Space(
            f"attention{heads.removeprefix('head')}",
            Permutation(spec.sizes[heads] * space.group.size),
        )
        for heads, space in values.items()
    }


def _flatten(axis: Product, flat: Mapping[str, Space], where: str) -> Product:
    """The axis with heads and the bases inside them as one space."""
    first, inner = axis.factors[0], axis.factors[-1]
    if not (isinstance(first, Atom) and first.space in flat):
        return _map_terms(axis, lambda term: _flatten(term, flat, where))
    if isinstance(inner, Sum):
        raise MismatchError(
            f"{where}: heads can only be ignored where queries, keys and values are not"
            " interleaved inside each head"
        )
    return Product((Atom(flat[first.space].name, inner.role),))


def _map_terms(axis: Product, change: Callable[[Product], Product]) -> Product:
    """The axis with the terms of its sums changed."""
    factors = (
        Sum(tuple(map(change, factor.terms))) if isinstance(factor, Sum) else factor
        for factor in axis.factors
    )
    return Product(tuple(factors))


def separate_streams(model: Model) -> Model:
    """Permute the stream anew after every block: skip connections then mix up coordinates."""
    spec, blocks = model.spec, 0
    tensors: dict[str, Axes] = {}
    for name in _forward_order(spec):
        axes = spec.tensors[name]
        if len(axes) == 2 and _writes_back(spec, axes):
            blocks += 1  # everything after a block's last matrix sees the stream after it
        tensors[name] = tuple(
            _rename(axis, spec.stream, f"{spec.stream}.{blocks}") for axis in axes
        )
    stream = spec.spaces[spec.stream]
    spaces = {name: space for name, space in spec.spaces.items() if name != spec.stream}
    names = [f"{spec.stream}.{block}" for block in range(blocks + 1)]
    spaces |= {name: replace(stream, name=name) for name in names}
    return replace(model, spec=replace(spec, spaces=spaces, tensors=tensors, norms=(), scales=()))


def _forward_order(spec: Spec) -> list[str]:
    """Tensors in forward order: those before the layers, the layers, and the rest."""
    names = list(spec.tensors)
    layers = {name: number for name in names if (number := layer_of(name)) is not None}
    first = min(map(names.index, layers), default=len(names))

    def order(name: str) -> tuple[int, int]:
        place = names.index(name)
        return layers.get(name, -1 if place < first else len(names)), place

    return sorted(names, key=order)


def _writes_back(spec: Spec, axes: Axes) -> bool:
    """Whether a matrix reads a hidden space inside a block and writes to the stream."""
    first, second = ({atom.space for atom in atoms((axis,))} for axis in axes)
    inner = spec.hidden.keys() - {spec.stream}
    joins = (spec.stream in first and second & inner) or (spec.stream in second and first & inner)
    return bool(joins) and any(
        atom.space == spec.stream and not atom.role.value for atom in atoms(axes)
    )


def _rename(axis: Product, old: str, new: str) -> Product:
    """The axis with one space renamed, also inside sums."""
    axis = _map_terms(axis, lambda term: _rename(term, old, new))
    factors = (
        Atom(new, factor.role) if isinstance(factor, Atom) and factor.space == old else factor
        for factor in axis.factors
    )
    return Product(tuple(factors))


NON_SYMMETRIC: Mapping[str, Callable[[Model], Model]] = {
    "ignore-heads": ignore_heads,
    "separate-streams": separate_streams,
}
