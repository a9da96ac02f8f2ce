"""Tables that allow more than the function does: two published ways to match that are no symmetries, for comparison only.

What is aligned by such a table is another function; the gate refuses to write it as an aligned checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from symmerge.errors import MismatchError
from symmerge.models.model import Model
from symmerge.symmetry.groups import Permutation, RotaryPairs
from symmerge.symmetry.notation import Atom, Axes, Product, Sum, atoms
from symmerge.symmetry.spec import Space, Spec, layer_of


def ignore_heads(model: Model) -> Model:
    """Every coordinate of an attention layer may go anywhere, whatever head it is in: tears heads apart."""
    spec = model.spec
    layers = {
        space.per: space
        for space in spec.spaces.values()
        if space.per and space.translation == "passes"
    }
    if any(isinstance(space.group, RotaryPairs) for space in spec.spaces.values()) or any(
        spec.sizes.get(f"query{per[4:]}", 1) > 1 for per in layers
    ):
        raise MismatchError(
            f"{model.where}: heads can only be ignored where queries, keys and values are alike (no rotary positions, no grouped heads)"
        )
    flat = {
        per: Space(
            f"attention{per.removeprefix('head')}", Permutation(spec.sizes[per] * space.group.size)
        )
        for per, space in layers.items()
    }

    def rename(product: Product) -> Product:
        first = product.factors[0]
        if isinstance(first, Atom) and first.space in flat:
            inner = product.factors[-1]
            if isinstance(inner, Sum):
                raise MismatchError(
                    f"{model.where}: heads can only be ignored where queries, keys and values are not interleaved inside each head"
                )
            return Product((Atom(flat[first.space].name, inner.role),))
        return Product(
            tuple(
                Sum(tuple(map(rename, factor.terms))) if isinstance(factor, Sum) else factor
                for factor in product.factors
            )
        )

    kept = {
        name: space
        for name, space in spec.spaces.items()
        if space.per not in flat and name not in flat
    }
    tensors = {name: tuple(map(rename, axes)) for name, axes in spec.tensors.items()}
    return replace(
        model,
        spec=replace(
            spec, spaces={**kept, **{space.name: space for space in flat.values()}}, tensors=tensors
        ),
    )


def separate_streams(model: Model) -> Model:
    """The stream may move anew after every block: the skip connections then add what lies in different coordinates."""
    spec, place = model.spec, 0
    tensors: dict[str, Axes] = {}
    for name in _forward(spec):
        axes = spec.tensors[name]
        if len(axes) == 2 and _writes_back(spec, axes):
            place += 1  # everything after a block's last matrix sees the stream after it
        tensors[name] = tuple(
            Product(tuple(_at(factor, spec.stream, place) for factor in axis.factors))
            for axis in axes
        )
    stream = spec.spaces[spec.stream]
    streams = {
        f"{spec.stream}.{at}": replace(stream, name=f"{spec.stream}.{at}")
        for at in range(place + 1)
    }
    kept = {name: space for name, space in spec.spaces.items() if name != spec.stream}
    return replace(
        model, spec=replace(spec, spaces={**kept, **streams}, tensors=tensors, norms=(), scales=())
    )


def _forward(spec: Spec) -> list[str]:
    """The tensors in the order in which they are used: what comes before the layers, the layers, and the rest."""
    names = list(spec.tensors)
    layer = {name: number for name in names if (number := layer_of(name)) is not None}
    first = min(map(names.index, layer), default=len(names))
    return sorted(
        names,
        key=lambda name: (
            layer.get(name, -1 if names.index(name) < first else len(names)),
            names.index(name),
        ),
    )


def _writes_back(spec: Spec, axes: Axes) -> bool:
    """Whether a matrix reads a hidden space inside a block and writes to the stream."""
    spaces = [{atom.space for atom in atoms((axis,))} for axis in axes]
    inner = spec.hidden.keys() - {spec.stream}
    return any(
        spec.stream in one and other & inner for one, other in (spaces, spaces[::-1])
    ) and any(atom.space == spec.stream and not atom.role.value for atom in atoms(axes))


def _at(factor: Atom | Sum, stream: str, place: int) -> Atom | Sum:
    if isinstance(factor, Sum):
        return Sum(
            tuple(
                Product(tuple(_at(inner, stream, place) for inner in term.factors))
                for term in factor.terms
            )
        )
    return Atom(f"{stream}.{place}", factor.role) if factor.space == stream else factor


NON_SYMMETRIC: Mapping[str, Callable[[Model], Model]] = {
    "ignore-heads": ignore_heads,
    "separate-streams": separate_streams,
}
