"""Write a narrow model exactly as a model of a wider architecture, so that both can be aligned.

Every space of the narrow model embeds in one of the wide model's; the table says in which role.

- The stream: x -> s R x, R with orthonormal columns. Writers become s R W, readers W R' / s.
  With s = sqrt(wide / narrow) the norm sees the same mean square, so epsilon needs no correction
  (and could get none: both models share one config).
- Units and heads: the extra ones are zero, or duplicates that share the output of others.
- Inside heads: zeros. Attention divides scores by the root of the head size; queries and keys
  each take the square root of the correction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symmerge.checkpoints.provenance import HistoryStep
from symmerge.checkpoints.weights import DerivedWeights, MemoryWeights, Weights
from symmerge.errors import MismatchError
from symmerge.models.canonical.form import canonicalize
from symmerge.models.model import Model
from symmerge.models.settings import differing_settings
from symmerge.symmetry.groups import OrthogonalFixingOnes, RotaryPairs, Signs
from symmerge.symmetry.groups.matrices import constant_gain
from symmerge.symmetry.groups.orthogonal import ones_complement
from symmerge.symmetry.notation import Piece, Role
from symmerge.symmetry.spec import Spec

Units = Literal["zero", "split"]
PRECISION = ("dtype", "torch_dtype")
ROTARY = RotaryPairs, Signs  # groups of coordinates that positions rotate

Include = Callable[[Tensor, int, Role], Tensor]
"""How a space embeds in a wider one: (piece, dimension, role) -> the widened piece."""


def widen(narrow: Model, wide: Model, *, units: Units = "zero", seed: int = 0) -> Model:
    """The function of `narrow` with the table and config of `wide` (as folded). Lazy.

    Extra units and heads are dead (`units="zero"`), or share the output of others ("split";
    `seed` chooses whose). Preconditions: the same class, depth and settings but for widths; a
    stream that rotates; nothing of `narrow` wider than in `wide`.
    """
    if units not in get_args(Units):
        raise MismatchError(f"units {units}: choose one of {', '.join(get_args(Units))}")
    _refuse_unlike(narrow, wide)
    folded, target = canonicalize(narrow, ("untie", "fold")), canonicalize(wide, ("fold",))
    _refuse_sizes(folded, target)
    assert folded.spec.tensors == target.spec.tensors
    into = _inclusions(folded, target.spec, units, torch.Generator().manual_seed(seed))
    weights = DerivedWeights(
        MemoryWeights({}),
        {name: partial(_widened, folded, target.spec, into, name) for name in folded.weights},
        added={
            name: (target.spec.shapes[name], folded.weights.dtype(name)) for name in folded.weights
        },
    )
    # The weights keep the narrow model's precision, and the config must say so.
    config = {key: value for key, value in target.config.items() if key not in PRECISION} | {
        key: narrow.config[key] for key in PRECISION if key in narrow.config
    }
    return folded.derive(
        weights,
        step=HistoryStep("widen", _what(folded.spec, target, units)),
        config=config,
        spec=target.spec,
    )


def _what(spec: Spec, target: Model, units: Units) -> str:
    sizes = {
        name.partition(".")[0]: f"{size} -> {target.spec.sizes[name]}"
        for name, size in spec.sizes.items()
        if size != target.spec.sizes[name]
    }
    changes = ", ".join(f"{name} {change}" for name, change in sizes.items()) or "nothing"
    extra = {
        "zero": "extra units and heads are zero",
        "split": "extra units and heads share the output of others",
    }[units]
    return f"written in the widths of {target.where}: {changes}; {extra}"


def _widened(model: Model, wide: Spec, into: Mapping[str, Include], name: str) -> Tensor:
    tensor = model.weights[name]
    result = tensor.new_empty(wide.shapes[name])
    for small, large in zip(model.spec.pieces[name], wide.pieces[name], strict=True):
        view = small.view(tensor)
        for position, atom in enumerate(small.atoms):
            if atom.space in into:
                view = into[atom.space](view, position, _role(model.spec, small, position))
        large.view(result).copy_(view)
    return result


def narrowed(change: Weights, narrow: Model, wide: Model) -> Weights:
    """The change of `narrow` that comes closest, by least squares, to one of `widen(narrow, wide)`.

    Both as folded. What lies outside the coordinates that `narrow` has is lost. Lazy.
    """
    into = _inclusions(narrow, wide.spec, "zero", torch.Generator())

    def fitted(name: str) -> Tensor:
        tensor, result = change[name], narrow.weights[name].clone()
        cut = zip(narrow.spec.pieces[name], wide.spec.pieces[name], strict=True)
        for small, large in cut:
            view = large.view(tensor)
            for position, atom in enumerate(small.atoms):
                if atom.space in into:
                    role = _role(narrow.spec, small, position)
                    view = _projected(into[atom.space], narrow, atom.space, view, position, role)
            small.view(result).copy_(view)
        return result

    computed = {name: partial(fitted, name) for name in narrow.spec.tensors}
    return DerivedWeights(narrow.weights, computed)


def _projected(
    include: Include, narrow: Model, space: str, view: Tensor, position: int, role: Role
) -> Tensor:
    """One dimension in narrow coordinates, by the pseudo-inverse of its embedding."""
    size = narrow.spec.sizes[space]
    if role is Role.RIDES and isinstance(include, Stream):  # a constant gain
        return view.narrow(position, 0, size)
    matrix = include(torch.eye(size, dtype=torch.float64), 0, role)
    back = torch.linalg.pinv(matrix).to(view)
    return (view.movedim(position, -1) @ back.mT).movedim(-1, position)


def _role(spec: Spec, piece: Piece, position: int) -> Role:
    """The role of a dimension. Heads have none in the table: they take that of their values."""
    atom = piece.atoms[position]
    reads_values = any(
        spec.spaces[other.space].translation == "passes" and other.role is Role.READS
        for other in piece.atoms
    )
    return Role.READS if reads_values and atom.space in _heads(spec) else atom.role


def _heads(spec: Spec) -> set[str]:
    """Spaces of heads, and of the query heads that share a key-value head."""
    inside = [space for space in spec.spaces.values() if space.per]
    return {space.per for space in inside if space.per} | {
        space.name for space in inside if space.translation is None
    }


# one embedding for each kind of space


def _inclusions(
    narrow: Model, wide: Spec, units: Units, generator: torch.Generator
) -> dict[str, Include]:
    """An embedding for every space that is wider in `wide`."""
    spec, into = narrow.spec, {}
    for name, space in spec.spaces.items():
        size, room = spec.sizes[name], wide.sizes[name]
        if size == room:
            continue
        if name == spec.stream:
            into[name] = Stream(
                orthonormal(size, room, fixing_ones=isinstance(space.group, OrthogonalFixingOnes)),
                stretch(size, room),
            )
        elif space.translation:  # inside a head
            scale = score_scale(narrow, size, room) ** 0.5 if space.translation == "drops" else 1.0
            into[name] = Places(places(size, room, "zero", generator), dict.fromkeys(Role, scale))
        else:
            index = places(size, room, units, generator)
            # Readers of a duplicated unit take an equal part from each copy.
            uses = index[index >= 0].bincount(minlength=size)[index].double()
            into[name] = Places(index, {Role.WRITES: 1.0, Role.READS: 1 / uses, Role.RIDES: 1.0})
    return into


@final
@dataclass(frozen=True)
class Stream:
    """The embedding x -> s R x: `rotation` is R, `stretch` is s."""

    rotation: Float[Tensor, "wide narrow"]
    stretch: float

    def __call__(self, view: Tensor, position: int, role: Role) -> Tensor:
        if role is Role.RIDES:  # a constant gain, as folding left it
            laid = constant_gain("a wider stream", view.movedim(position, 0)[:, None])
            return laid[:1, 0].expand(len(self.rotation), *laid.shape[2:]).movedim(0, position)
        matrix = self.rotation * (self.stretch if role is Role.WRITES else 1 / self.stretch)
        return (view.movedim(position, -1) @ matrix.mT.to(view)).movedim(-1, position)


def stretch(size: int, room: int) -> float:
    """The factor that preserves the mean square over all coordinates."""
    return (room / size) ** 0.5


def orthonormal(size: int, room: int, *, fixing_ones: bool) -> Float[Tensor, "room size"]:
    """Orthonormal columns; `fixing_ones` keeps the ones direction, which LayerNorm removes."""
    if not fixing_ones:
        return torch.eye(room, size, dtype=torch.float64)
    return ones_complement(room)[:, : size - 1] @ ones_complement(size).mT + (room * size) ** -0.5


@final
@dataclass(frozen=True)
class Places:
    """For each wide coordinate, the narrow one it holds (-1: none) and its factor by role."""

    index: Int[Tensor, " wide"]
    scale: Mapping[Role, float | Float[Tensor, " wide"]]

    def __call__(self, view: Tensor, position: int, role: Role) -> Tensor:
        factor = (self.index >= 0) * torch.as_tensor(self.scale[role], dtype=torch.float64)
        shape = [-1 if dim == position else 1 for dim in range(view.ndim)]
        return view.index_select(position, self.index.clamp_min(0).to(view.device)) * factor.to(
            view
        ).reshape(shape)


def places(size: int, room: int, units: Units, generator: torch.Generator) -> Int[Tensor, " room"]:
    """Indices of the narrow coordinates, then -1 (zero), or each once more in random order."""
    if units == "zero":
        return torch.cat([torch.arange(size), torch.full((room - size,), -1)])
    twins = [torch.randperm(size, generator=generator) for _ in range(room // size)]
    return torch.cat([torch.arange(size), *twins])[:room]


def score_scale(model: Model, size: int, room: int) -> float:
    """Corrects attention scores for a different head size, if the config scales them at all."""
    return (room / size) ** 0.5 if model.config.get("scale_attn_weights", True) else 1.0


# what cannot be widened


def _refuse_unlike(narrow: Model, wide: Model) -> None:
    """Refuse models that differ in anything but widths."""
    pair = f"{narrow.where} cannot be widened to {wide.where}"
    if narrow.spec.architecture != wide.spec.architecture:
        raise MismatchError(
            f"{pair}; they differ in: class {narrow.spec.architecture} /"
            f" {wide.spec.architecture}: give two models of the same class"
        )
    for model in (narrow, wide):
        if not model.stock:
            raise MismatchError(
                f"{pair}: the heads of {model.where} are twice as large; give the models it was"
                " merged from, or merge with --attention svd"
            )
        if model.spec.shows_stream:
            raise MismatchError(
                f"{pair}: coordinates of the stream of {model.spec.family} are visible, and a"
                " wider stream has no matching ones; give models of the same width"
            )
        if not model.spec.rotates(model.spec.stream):
            raise MismatchError(
                f"{pair}: the norms of {model.spec.family} sit on the stream itself, with gains"
                " that cannot be folded away, and take mean and variance over"
                " all of its coordinates, so padding a narrow stream with zeros changes their"
                " outputs; only models whose stream rotates can be widened"
                " (restrict them afterwards)"
            )
    differing = differing_settings(narrow, wide)
    if differing:
        raise MismatchError(
            f"{pair}; they differ in: {'; '.join(differing)}: only widths may differ; give models"
            " that agree in everything else"
        )


def _normed(spec: Spec, space: str) -> bool:
    """Whether a norm's gain sits on a space."""
    return any(
        met.role is Role.RIDES
        and met.piece.tensor.endswith("weight")
        and len(spec.shapes[met.piece.tensor]) == 1
        for met in spec.occurrences(space)
    )


def _refuse_sizes(narrow: Model, wide: Model) -> None:
    pair = f"{narrow.where} cannot be widened to {wide.where}"
    if wide.spec.ties:
        raise MismatchError(
            f"{pair}: the head of {wide.where} shares its embedding, and its last gain is"
            " constant, so folding keeps the tie; but a widened"
            " embedding is stretched and its head shrunk, so they cannot share weights:"
            ' untie it first, with canonicalize(wide, ("untie",))'
        )
    sizes = {name: (size, wide.spec.sizes[name]) for name, size in narrow.spec.sizes.items()}
    for name, space in narrow.spec.spaces.items():
        if isinstance(space.group, ROTARY) and space.group != wide.spec.spaces[name].group:
            what = "rotary pairs" if isinstance(space.group, Signs) else "coordinates"
            raise MismatchError(
                f"{pair}: heads of {sizes[name][0]} / {sizes[name][1]} {what}, whose rotary"
                " frequencies differ;"
                " give a wide model with heads of the same size, and more of them"
            )
        if (
            sizes[name][0] != sizes[name][1]
            and name != narrow.spec.stream
            and _normed(narrow.spec, name)
        ):
            raise MismatchError(
                f"{pair}: '{name}' ({sizes[name][0]} / {sizes[name][1]}) is normalised right"
                " after an activation, so that extra units would change its mean and"
                " variance; give a wide model that only differs in its feed-forward units"
            )
    larger = {
        name.partition(".")[0]: f"{size} / {room}"
        for name, (size, room) in sizes.items()
        if size > room
    }
    smaller = any(size < room for size, room in sizes.values())
    if larger:
        remedy = (
            "give a model that is at least as wide in everything (query: query heads per key)"
            if smaller
            else "swap the two"
        )
        raise MismatchError(
            f"{pair}, which is narrower in:"
            f" {', '.join(f'{name} {change}' for name, change in larger.items())}; {remedy}"
        )
