"""Ways to transform a model that are symmetries, and look-alikes that are not."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

import symmerge as sm
from symmerge.checkpoints.weights import DerivedWeights
from symmerge.lab.small_models import small_model
from symmerge.models.alignment import Alignment
from symmerge.models.model import Model
from symmerge.symmetry.groups import (
    OrthogonalFixingOnes,
    Permutation,
    ScaledPermutation,
)
from symmerge.symmetry.notation import parse, unparse
from symmerge.symmetry.spec import Space

ALLOWED, FORBIDDEN = 1e-10, 1e-2
AnySign = partial(ScaledPermutation, positive=False)


@dataclass(frozen=True)
class Control:
    """Two ways to transform a model: one a symmetry, one not."""

    allowed: Callable[[Model], Model]
    forbidden: Callable[[Model], Model]


@cache
def loaded(name):
    return sm.load(small_model(name, dtype=torch.float64))


@cache
def folded(name):
    return sm.canonicalize(loaded(name), ("fold",))


def kind_of(space):
    """The name of a space without its layer."""
    return space.partition(".")[0]


def meant(name, space):
    """Whether a space is of this kind, or the very one."""
    return space in (kind_of(name), name)


def move(model, space, seed=1):
    """Transform the spaces of one kind, in every layer, or one space, and nothing else."""
    generator, identity = torch.Generator().manual_seed(seed), Alignment.identity(model.spec)
    elements = {
        name: other.group.random(generator, model.spec.batch(name))
        for name, other in model.spec.hidden.items()
        if meant(name, space)
    }
    assert elements, f"no space {space}"
    return sm.apply(replace(identity, elements={**identity.elements, **elements}), model)


def regroup(model, space, group):
    """The model with another group for the spaces of one kind."""
    spaces = {
        name: replace(old, group=group(old.group.size)) if meant(name, space) else old
        for name, old in model.spec.spaces.items()
    }
    return replace(model, spec=replace(model.spec, spaces=spaces))


@cache
def moving(space):
    """The allowed way; cached, so that the controls of a space share its measurement."""
    return partial(move, space=space)


def wrong_group(space, group):
    return Control(moving(space), lambda model: move(regroup(model, space, group), space))


def whole_heads(model, group):
    """The table of a head that is not cut into the halves of its rotary pairs."""
    tensors = {
        name: parse(re.sub(r"half (?=qk)", "", unparse(axes)))
        for name, axes in model.spec.tensors.items()
    }
    spaces = {
        name: replace(old, group=group(2 * old.group.size)) if kind_of(name) == "qk" else old
        for name, old in model.spec.spaces.items()
    }
    return replace(model, spec=replace(model.spec, spaces=spaces, tensors=tensors))


def wrong_pairs(group):
    """Another group for the coordinates of queries and keys that are normed."""
    return Control(moving("qk"), lambda model: move(whole_heads(model, group), "qk"))


def left_behind(*names, space="residual"):
    """The stream moves, but these tensors do not: a forgotten head or tied decoder."""

    def forbidden(model):
        moved = move(model, space)
        old = {name: partial(model.weights.__getitem__, name) for name in names}
        return replace(moved, weights=DerivedWeights(moved.weights, old))

    return Control(moving(space), forbidden)


def edit(model, change):
    """Edit by hand: `change(view, spaces)` gives the new entries of a piece, or None."""

    def edited(name):
        tensor = model.weights[name].clone()
        for piece in model.spec.pieces[name]:
            view = piece.view(tensor)
            new = change(view, [kind_of(atom.space) for atom in piece.atoms])
            if new is not None:
                view.copy_(new)
        return tensor

    computed = {name: partial(edited, name) for name in model.spec.tensors}
    return replace(model, weights=DerivedWeights(model.weights, computed))


def roll(outer, *inner):
    """Every head (or query) to the next place, but only beside one of the `inner` spaces."""

    def change(view, spaces):
        if outer in spaces and {*inner} & {*spaces}:
            return view.roll(1, spaces.index(outer))
        return None

    return partial(edit, change=change)


def across_groups(model):
    """Query heads change places across groups, as if each had its own key."""

    def change(view, spaces):
        if "query" not in spaces:
            return None
        head = spaces.index("head")
        rolled = view.flatten(head, head + 1).roll(1, head)
        return rolled.unflatten(head, view.shape[head : head + 2])

    return edit(model, change)


TORN_HEADS = Control(roll("head", "qk", "vo"), roll("head", "vo"))
QUERIES_ACROSS_GROUPS = Control(roll("query", "qk", "vo"), across_groups)


def gate_as_writer(model):
    """The gate scaled with the up branch, though it goes through the activation."""
    tensors = {
        name: parse(re.sub(r"(ff\.[\w.]+)~", r"\1", unparse(axes)))
        for name, axes in model.spec.tensors.items()
    }
    return move(replace(model, spec=replace(model.spec, tensors=tensors)), "ff")


SCALED_GATE = Control(moving("ff"), gate_as_writer)


def apart(model, space):
    """Only one moves of two tied spaces: the stream, and the output of the decoder's transform."""
    head = ("cls.predictions.transform.", "lm_head.dense.", "lm_head.layer_norm.")
    head += ("vocab_transform.", "vocab_layer_norm.", "generator_predictions.")
    changed = {
        name: parse(re.sub(r"^residual", "transform", unparse(axes)))
        for name, axes in model.spec.tensors.items()
        if name.startswith(head)
    }
    assert len(changed) == 4
    transform = Space("transform", Permutation(model.spec.sizes["residual"]))
    spec = replace(
        model.spec,
        spaces={**model.spec.spaces, "transform": transform},
        tensors={**model.spec.tensors, **changed},
    )
    return move(replace(model, spec=spec), space)


TIED_DECODER = {
    "tied decoder moved, its transform not": Control(
        moving("residual"), partial(apart, space="residual")
    ),
    "tied decoder's transform moved alone": Control(
        moving("residual"), partial(apart, space="transform")
    ),
}


def shown_permuted(model):
    return move(regroup(model, "residual", Permutation), "residual")


def all_of_the_stream(model):
    """The table of a stream without visible coordinates."""
    tensors = {
        name: parse(re.sub(r"\(label(\W?) \+ residual\W?\)", r"residual\1", unparse(axes)))
        for name, axes in model.spec.tensors.items()
    }
    width = model.spec.sizes["label"] + model.spec.sizes["residual"]
    spaces = {**model.spec.spaces, "residual": Space("residual", OrthogonalFixingOnes(width))}
    del spaces["label"]
    return replace(model, spec=replace(model.spec, spaces=spaces, tensors=tensors))


def scores_not_fixed(model):
    """All of the stream rotates; the last gain does not follow."""
    gain, shift = model.weights["norm.weight"], model.weights["norm.bias"]

    def with_norm(weights, gain, shift):
        return DerivedWeights(weights, {"norm.weight": lambda: gain, "norm.bias": lambda: shift})

    plain = with_norm(model.weights, torch.ones_like(gain), torch.zeros_like(shift))
    moved = move(replace(all_of_the_stream(model), weights=plain), "residual")
    return replace(moved, spec=model.spec, weights=with_norm(moved.weights, gain, shift))
