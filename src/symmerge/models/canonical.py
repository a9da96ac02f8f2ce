"""The canonical form: the same function with every gauge fixed that a checkpoint leaves open. Exact, lazy, recorded.

Folding the gains is what makes rotations of the stream possible at all; the other steps make two models comparable.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from symmerge.checkpoints.weights import DerivedWeights, Weights
from symmerge.errors import SymmetryError
from symmerge.models.absorption import absorb
from symmerge.models.alignment import lay
from symmerge.models.model import Model, rebind
from symmerge.symmetry.groups import (
    GeneralLinear,
    Group,
    OrthogonalFixingOnes,
    RotaryPairs,
    ScaledPermutation,
    linalg,
)
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Norm, Occurrence, Spec

Computed = dict[str, Callable[[], Tensor]]
SMALLEST_GAIN = (
    1e-4  # of the largest: dividing a shift by less costs float32 more digits than the gate allows
)


def canonicalize(model: Model, steps: tuple[str, ...] | None = None) -> Model:
    """The same function in canonical form; `steps` (default: all of `STEPS`) are done in their order here, those `ON_REQUEST` first.

    Steps that have nothing to do leave the model as it is: a post-norm or permutation-only stream keeps its gains and its tie.
    """
    known = ON_REQUEST | STEPS
    unknown = set(steps or ()) - known.keys()
    if unknown:
        raise SymmetryError(
            f"no canonical step called {', '.join(sorted(unknown))}: there are {', '.join(known)}"
        )
    for name, step in known.items():
        if name in (STEPS if steps is None else steps):
            model = step(model)
    return model


def _derive(model: Model, computed: Computed, step: str, what: str) -> Model:
    if not computed:
        return model
    return model.derive(DerivedWeights(model.weights, computed), step={"step": step, "what": what})


# fold: gains and shifts of the norms go into the maps that read them


def fold(model: Model) -> Model:
    """Fold every gain on a rotating stream into its readers, so that the norm commutes with rotations."""
    if any(model.spec.rotates(space) for space in model.spec.joined):
        model = _own_copies(
            model,
            list(model.spec.ties),
            "what it reads comes out of an activation, and cannot rotate with the embedding",
        )
    norms = [
        norm
        for norm in model.spec.norms
        if model.spec.rotates(norm.stream) and not _commutes(norm, model)
    ]
    model = _untie(model, norms)
    computed, scales = _fold_scales(model)
    shifts = 0
    for norm in norms:
        weights = model.weights
        if not norm.readers:
            unread = {name: value for name, value in ((norm.gain, 1.0), (norm.shift, 0.0)) if name}
            computed |= {
                name: partial(_filled, weights, model.spec.part(name, norm.stream), value)
                for name, value in unread.items()
            }
            continue
        if norm.writer:
            computed |= absorb(model.spec, weights, norm)
            continue
        for reader in norm.readers:
            axis = model.spec.axis_of(f"{reader}.weight", norm.stream, Role.READS)
            computed[f"{reader}.weight"] = partial(
                _scaled, weights, f"{reader}.weight", norm.gain, axis
            )
        computed[norm.gain] = partial(_ones, weights, norm.gain)
        if norm.shift is None:
            continue
        shifts += 1
        if all(f"{reader}.bias" in model.spec.tensors for reader in norm.readers):
            for reader in norm.readers:
                axis = model.spec.axis_of(f"{reader}.weight", norm.stream, Role.READS)
                computed[f"{reader}.bias"] = partial(_pushed, weights, reader, norm.shift, axis)
            computed[norm.shift] = partial(_zeros, weights, norm.shift)
        else:
            _refuse_lost_shift(norm, model)
            computed[norm.shift] = partial(_divided, weights, norm)
    what = f"{len(norms)} gains and {shifts} shifts folded into the maps that read them" + (
        f", {scales} scales into those they follow" if scales else ""
    )
    return _derive(model, computed, "fold", what)


def _fold_scales(model: Model) -> tuple[Computed, int]:
    """Gains that follow a map go into it; how many there were."""
    computed: Computed = {}
    scales = [
        scale
        for scale in model.spec.scales
        if model.spec.rotates(scale.stream) and not (model.weights[scale.gain] == 1).all()
    ]
    for scale in scales:
        for name in {f"{scale.writer}.weight", f"{scale.writer}.bias"} & model.spec.tensors.keys():
            computed[name] = partial(
                _scaled,
                model.weights,
                name,
                scale.gain,
                model.spec.axis_of(name, scale.stream, Role.WRITES),
            )
        computed[scale.gain] = partial(_ones, model.weights, scale.gain)
    return computed, len(scales)


def _commutes(norm: Norm, model: Model) -> bool:
    """A constant gain without a shift commutes with rotations as it is; a tied head need not be untied for it."""
    views = [
        model.weights[name]
        if norm.readers
        else model.spec.part(name, norm.stream).view(model.weights[name])
        for name in (norm.gain, norm.shift)
        if name
    ]
    gain, *shift = views
    return bool((gain == gain[0]).all()) and not any(part.any() for part in shift)


def _untie(model: Model, norms: list[Norm]) -> Model:
    """Give a tied head weights of its own where a gain must be folded into it."""
    needed = [
        f"{reader}.weight"
        for norm in norms
        for reader in norm.readers
        if f"{reader}.weight" in model.spec.ties
    ]
    return _own_copies(model, needed, "the final gain is folded into it") if needed else model


def untie(model: Model) -> Model:
    """Give every tied tensor weights of its own: what it reads may then move by itself. The checkpoint grows by them."""
    return (
        _own_copies(model, list(model.spec.ties), "so that what it reads can move by itself")
        if model.spec.ties
        else model
    )


def _own_copies(model: Model, aliases: list[str], why: str) -> Model:
    shared = {alias: model.spec.ties[alias] for alias in aliases}
    weights = DerivedWeights(
        model.weights,
        {alias: partial(_copy, model.weights, target) for alias, target in shared.items()},
        added={
            alias: (model.weights.shape(target), model.weights.dtype(target))
            for alias, target in shared.items()
        },
    )
    what = "; ".join(f"{alias} no longer shares {target}" for alias, target in shared.items())
    return rebind(
        model,
        {**model.config, "tie_word_embeddings": False},
        weights,
        step={"step": "untie", "what": f"{what}: {why}"},
    )


def _copy(weights: Weights, name: str) -> Tensor:
    return weights[name]


def _scaled(weights: Weights, name: str, gain: str, axis: int) -> Tensor:
    weight = weights[name]
    return weight * weights[gain].reshape([-1 if dim == axis else 1 for dim in range(weight.ndim)])


def _pushed(weights: Weights, reader: str, shift: str, axis: int) -> Tensor:
    # With the old weight: the shift is added after the gain.
    return (
        weights[f"{reader}.bias"] + weights[f"{reader}.weight"].movedim(axis, -1) @ weights[shift]
    )


def _divided(weights: Weights, norm: Norm) -> Tensor:
    assert norm.shift is not None
    gain, shift = weights[norm.gain], weights[norm.shift]
    return torch.where(
        gain == 0,
        torch.zeros_like(shift),
        shift / torch.where(gain == 0, torch.ones_like(gain), gain),
    )


def _ones(weights: Weights, name: str) -> Tensor:
    return torch.ones_like(weights[name])


def _zeros(weights: Weights, name: str) -> Tensor:
    return torch.zeros_like(weights[name])


def _filled(weights: Weights, piece: Piece, value: float) -> Tensor:
    tensor = weights[piece.tensor].clone()
    piece.view(tensor).fill_(value)
    return tensor


def _refuse_lost_shift(norm: Norm, model: Model) -> None:
    """A zero gain with a shift, read by a map without bias, has nowhere to put that shift; nearly zero, it would lose its digits."""
    assert norm.shift is not None
    gain = model.weights[norm.gain].abs()
    lost = (gain < SMALLEST_GAIN * gain.amax()) & (model.weights[norm.shift] != 0)
    if not lost.any():
        return
    for reader in norm.readers:
        axis = model.spec.axis_of(f"{reader}.weight", norm.stream, Role.READS)
        if model.weights[f"{reader}.weight"].movedim(axis, 0)[lost].any():
            places = ", ".join(str(i) for i in lost.nonzero().flatten()[:4].tolist())
            raise SymmetryError(
                f"{norm.gain} is zero, or too small to divide by, at {places} where {norm.shift} is not, and {reader} has no bias to take it:"
                f" rotations of '{norm.stream}' are not possible; restrict it to permutations"
            )


# centre: LayerNorm subtracts the mean, so nobody needs to write or read it


def centre(model: Model) -> Model:
    """Take the mean out of what writes to a LayerNorm stream, and the ones direction out of what reads it."""
    computed: Computed = {}
    shifts = {norm.shift for norm in model.spec.norms}
    kept = {
        f"{reader}.weight"
        for norm in model.spec.norms
        if norm.shift and model.weights[norm.shift].any()
        for reader in norm.readers
    }
    for name, space in model.spec.hidden.items():
        if not isinstance(space.group, OrthogonalFixingOnes):
            continue
        for met in model.spec.occurrences(name):
            tensor = met.piece.tensor
            # A head whose norm keeps its shift also reads the shift's ones component: leave it.
            if met.role is Role.RIDES or tensor in shifts or tensor in kept:
                continue
            computed[tensor] = partial(
                _centred, model.weights, tensor, model.spec.axis_of(tensor, name, met.role)
            )
    return _derive(
        model, computed, "centre", f"the mean over the stream taken out of {len(computed)} tensors"
    )


def _centred(weights: Weights, name: str, axis: int) -> Tensor:
    tensor = weights[name]
    return tensor - tensor.mean(axis, keepdim=True)


# values and keys: biases inside attention that can live elsewhere, or nowhere


def move_value_biases(model: Model) -> Model:
    """Attention weights sum to one, so a constant on the values is a constant after the output map."""
    computed: Computed = {}
    for name, space in model.spec.hidden.items():
        if space.translation != "passes" or isinstance(
            space.group, RotaryPairs
        ):  # turned with the position, it is no constant
            continue
        biases = [
            met
            for met in model.spec.occurrences(name)
            if met.role is Role.WRITES and _is_bias(met, model.spec)
        ]
        for output in (met for met in model.spec.occurrences(name) if met.role is Role.READS):
            target = output.piece.tensor.removesuffix("weight") + "bias"
            if target not in model.spec.tensors or not any(
                _read(bias, model.weights).any() for bias in biases
            ):
                continue
            computed[target] = partial(_with_values, model, target, name, tuple(biases))
            computed |= {
                bias.piece.tensor: partial(_zeroed, model.weights, bias, 0) for bias in biases
            }
    return _derive(
        model,
        computed,
        "values",
        f"value biases moved into the output bias of {len(computed) // 2} layers",
    )


def drop_key_biases(model: Model) -> Model:
    """A constant on every key adds the same to all scores of a query, and the softmax does not see it; rotary coordinates differ."""
    computed: Computed = {}
    for name, space in model.spec.hidden.items():
        if space.translation != "drops":
            continue
        start = space.group.rotary if isinstance(space.group, RotaryPairs) else 0
        if start == space.group.size:
            continue
        for met in model.spec.occurrences(name):
            if (
                met.role is Role.READS
                and _is_bias(met, model.spec)
                and _read(met, model.weights).any()
            ):
                computed[met.piece.tensor] = partial(_zeroed, model.weights, met, start)
    return _derive(
        model,
        computed,
        "keys",
        f"key biases of {len(computed)} layers set to zero where positions do not rotate them",
    )


def _is_bias(met: Occurrence, spec: Spec) -> bool:
    return len(spec.tensors[met.piece.tensor]) == 1


def _read(met: Occurrence, weights: Weights) -> Tensor:
    return met.piece.view(weights[met.piece.tensor])


def _zeroed(weights: Weights, met: Occurrence, start: int) -> Tensor:
    tensor = weights[met.piece.tensor].clone()
    view = met.piece.view(tensor)
    view.narrow(met.position, start, view.shape[met.position] - start).zero_()
    return tensor


def _with_values(model: Model, target: str, space: str, biases: tuple[Occurrence, ...]) -> Tensor:
    bias = model.weights[target].clone()
    outputs = [
        met
        for met in model.spec.occurrences(space)
        if met.role is Role.READS and met.piece.tensor.removesuffix("weight") + "bias" == target
    ]
    for output in outputs:  # one, unless something lies beside the stream
        letters = dict(
            zip((atom.space for atom in output.piece.atoms), string.ascii_lowercase, strict=False)
        )
        into = next(piece for piece in model.spec.pieces[target] if piece.atoms[0].space in letters)
        for value in biases:
            inputs = [
                "".join(letters[atom.space] for atom in met.piece.atoms) for met in (output, value)
            ]
            moved = torch.einsum(
                f"{inputs[0]},{inputs[1]}->{letters[into.atoms[0].space]}",
                _read(output, model.weights),
                _read(value, model.weights),
            )
            into.view(bias).add_(moved)
    return bias


# balance: share the size of a circuit evenly between the two sides of its space


def balance(model: Model) -> Model:
    """In every space where only products matter, give writers and readers the same size; heads go to the basis of their SVD."""
    rebalanced = {name for name, space in model.spec.hidden.items() if type(space.group) in BALANCE}
    if not rebalanced:
        return model
    sides = once(partial(_balanced_pieces, model))
    computed: Computed = {}
    for name in rebalanced:
        for met in model.spec.occurrences(name):
            if met.role is not Role.RIDES:
                computed[met.piece.tensor] = partial(
                    with_pieces,
                    model.spec,
                    met.piece.tensor,
                    model.weights.__getitem__,
                    sides,
                    rebalanced,
                )
    return _derive(
        model, computed, "balance", f"writers and readers of {len(rebalanced)} spaces balanced"
    )


Sides = Callable[[str], Mapping[Piece, Tensor]]
"""The new pieces of every tensor that meets a space."""


def once(compute: Sides) -> Sides:
    """Tensors of a space are asked for at the same time by the threads that write them: the second waits for what the first computes."""
    lock, cached = (
        Lock(),
        lru_cache(maxsize=6)(compute),
    )  # a tensor may hold pieces of several spaces

    def sides(space: str) -> Mapping[Piece, Tensor]:
        with lock:
            return cached(space)

    return sides


def with_pieces(
    spec: Spec, tensor: str, read: Callable[[str], Tensor], sides: Sides, spaces: set[str]
) -> Tensor:
    """A tensor with its pieces in some spaces replaced."""
    result = read(tensor).clone()
    for piece in spec.pieces[tensor]:
        for atom in piece.atoms:
            if atom.space in spaces and atom.role is not Role.RIDES:
                piece.view(result).copy_(sides(atom.space)[piece])
    return result


class Place(NamedTuple):
    """Where some columns of a circuit's side belong: a piece, how many they are, and how to lay them back into it."""

    piece: Piece
    width: int
    undo: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Circuit:
    """All that writes to a space (`x`) and all that reads from it (`y`), side by side; only x'y matters to the function."""

    x: Float[Tensor, "b n x"]
    y: Float[Tensor, "b n y"]
    writers: tuple[Place, ...]
    readers: tuple[Place, ...]

    def pieces(self, x: Float[Tensor, "b n x"], y: Float[Tensor, "b n y"]) -> dict[Piece, Tensor]:
        """Other factors, as pieces of the tensors they belong to."""
        found = {}
        for places, whole in ((self.writers, x), (self.readers, y)):
            for place, part in zip(
                places, whole.split([place.width for place in places], -1), strict=True
            ):
                found[place.piece] = place.undo(part)
        return found


def circuit(model: Model, space: str) -> Circuit:
    """The two sides of a space."""
    per, sides = model.spec.spaces[space].per, {}
    for role in (Role.WRITES, Role.READS):
        places, parts = [], []
        for met in model.spec.occurrences(space):
            if met.role is role:
                outer = None if per is None else next(met.piece.positions(per))
                laid, undo = lay(_read(met, model.weights), met.position, outer)
                places.append(Place(met.piece, laid.shape[-1], undo))
                parts.append(laid)
        sides[role] = torch.cat(parts, -1), tuple(places)
    (x, writers), (y, readers) = sides[Role.WRITES], sides[Role.READS]
    return Circuit(x, y, writers, readers)


def _balanced_pieces(model: Model, space: str) -> dict[Piece, Tensor]:
    group, found = model.spec.spaces[space].group, circuit(model, space)
    x, y = BALANCE[type(group)](group, found.x.double(), found.y.double())
    return found.pieces(x.to(found.x), y.to(found.y))


Pair = tuple[Float[Tensor, "b n x"], Float[Tensor, "b n y"]]


def balance_circuit(group: Group, x: Float[Tensor, "b n x"], y: Float[Tensor, "b n y"]) -> Pair:
    """x'y = U S V' without forming it: QR both thin factors, SVD the small core."""
    (x_basis, x_core), (y_basis, y_core) = linalg.qr(x.mT), linalg.qr(y.mT)
    u, s, vh = linalg.svd(x_core @ y_core.mT, full_matrices=False)
    root = s.sqrt()[..., None]
    pad = (0, 0, 0, x.shape[-2] - s.shape[-1])
    grow = torch.nn.functional.pad
    return grow(root * (x_basis @ u).mT, pad), grow(root * (y_basis @ vh.mT).mT, pad)


def _balance_rows(x: Tensor, y: Tensor) -> Pair:
    sizes = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    scale = torch.where(
        (sizes[0] > 0) & (sizes[1] > 0),
        (sizes[1] / sizes[0].clamp_min(1e-300)).sqrt(),
        torch.ones_like(sizes[0]),
    )
    return x * scale, y / scale


def _balance_scales(group: Group, x: Tensor, y: Tensor) -> Pair:
    return _balance_rows(x, y)


def _balance_rotary(group: Group, x: Tensor, y: Tensor) -> Pair:
    assert isinstance(group, RotaryPairs)
    turned, rest = [], []
    for side in (x, y):
        first, second, others = group.split(side)
        turned.append(torch.cat([first, second], -1))
        rest.append(others)
    turned = _balance_rows(*turned)
    rest = balance_circuit(group, *rest) if group.rest.size else rest
    half = turned[0].shape[-1] // 2, turned[1].shape[-1] // 2
    queries, keys = (side.split(width, -1) for side, width in zip(turned, half, strict=True))
    return group.join(queries[0], queries[1], rest[0]), group.join(keys[0], keys[1], rest[1])


BALANCE: dict[type[Group], Callable[[Any, Tensor, Tensor], Pair]] = {
    GeneralLinear: balance_circuit,
    ScaledPermutation: _balance_scales,
    RotaryPairs: _balance_rotary,
}

STEPS: dict[str, Callable[[Model], Model]] = {
    "fold": fold,
    "centre": centre,
    "values": move_value_biases,
    "keys": drop_key_biases,
    "balance": balance,
}
ON_REQUEST: dict[str, Callable[[Model], Model]] = {"untie": untie}
